"""The check that all ranks hold the same perturbation."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.unit.methods.adversary.toy import Setting, toy_hook, toy_trainer
from trp_scale.core.hooks import StepContext
from trp_scale.methods.adversary.positions import fingerprint

SGD = {"ascent": "sgd", "lr": 0.3, "eps": 0.4}


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.data())
def test_one_bit_makes_another_fingerprint(values: list[float], data: st.DataObject) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    bits = vector.view(torch.int32).clone()
    place = data.draw(st.integers(0, len(values) - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 30))
    assert 0 <= int(fingerprint([vector])) < 2**62
    assert int(fingerprint([vector])) == int(fingerprint([vector.clone()]))
    assert int(fingerprint([bits.view(torch.float32)])) != int(fingerprint([vector]))


def test_the_sign_of_zero_the_order_and_each_tensor_count() -> None:
    vector, steps = torch.tensor([1.0, 2.0, 0.0]), torch.tensor(7)
    prints = [
        fingerprint([vector, steps]),
        fingerprint([torch.tensor([2.0, 1.0, 0.0]), steps]),
        fingerprint([torch.tensor([1.0, 2.0, -0.0]), steps]),
        fingerprint([vector, steps + 1]),
        fingerprint([vector]),
    ]
    assert len({int(each) for each in prints}) == len(prints)


class Scripted:
    """A group of two whose maximum is as if the other rank held one more."""

    size, rank = 2, 0

    def max(self, value: Tensor) -> Tensor:
        return torch.maximum(value, torch.stack([value[0] + 1, value[1] - 1]))

    def gather_objects(self, value: int) -> list[int]:
        return [value, value + 1]


def elsewhere(ctx: StepContext) -> StepContext:
    return replace(ctx, run=replace(ctx.run, engine=Elsewhere()))


@pytest.mark.parametrize("update", ["parallel", "sequential"])
def test_the_hook_checks_on_its_steps(update: str) -> None:
    setting = Setting(adversary={**SGD, "update": update, "check_every": 2})
    hook = toy_hook(setting)
    trainer = toy_trainer(setting, hook)
    start = hook.agreement.start
    hook.agreement.start = lambda ctx, tensors: start(elsewhere(ctx), tensors)
    finish = hook.agreement.finish
    hook.agreement.finish = lambda ctx: finish(elsewhere(ctx))
    trainer.train_step()
    with pytest.raises(RuntimeError, match="step 2"):
        trainer.train_step()


class Elsewhere:
    """An engine of two ranks that disagree."""

    data_group = Scripted()
