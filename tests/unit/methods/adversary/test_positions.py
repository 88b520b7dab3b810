"""The adversary on positions over the real loop, against the same steps written out in float64; offsets beyond the
table, and the check that all ranks hold the same perturbation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.unit.methods.adversary.toy import CPU, Setting, Toy, gradient, stand_in_run, toy_hook, toy_trainer
from trp_scale.config import RefusedError
from trp_scale.config.registry import make_settings
from trp_scale.core.hooks import Hook, StepContext, built
from trp_scale.methods.adversary.ascent import Balls
from trp_scale.methods.adversary.positions import PositionAdversary, Saturation, fingerprint
from trp_scale.models.positions import BUCKETS, PerturbationShape, grid_offsets, node_weights

SGD = {"ascent": "sgd", "lr": 0.3, "eps": 0.4}
ASCENTS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "sgd l2": {**SGD, "norm": "l2"},
    "sign": {"ascent": "sign", "lr": 0.05, "eps": 0.4},
    "adamw": {"ascent": "adamw", "eps": 0.05},
    "adamw of its own rate": {"ascent": "adamw", "lr": 0.06, "eps": 0.3},
}
BALANCING = {"uniform": {"kind": "uniform"}, "exact": {"kind": "minimax", "estimate": "exact"}}


def clipped(vector: Tensor, norm: str, eps: float) -> Tensor:
    """Projection of [blocks * 2] written out."""
    if norm == "linf":
        return vector.clamp(-eps, eps)
    pairs = vector.view(-1, 2)
    return torch.cat([pair * min(1.0, eps / max(float(pair.norm()), 1e-300)) for pair in pairs])


def written_out(setting: Setting, steps: int) -> tuple[Tensor, Tensor]:
    """Weight and perturbation [numel] float64 after `steps`, gradient descent below and ascent above."""
    adversary, rate = setting.config().adversary, setting.config().optimizer.lr
    weight = Toy(setting.shape.numel).weight.detach().double()
    vector = torch.nn.Parameter(torch.zeros(setting.shape.numel, dtype=torch.float64))
    optimizer = setting.config().optimizer
    adamw = torch.optim.AdamW(
        [vector],
        lr=adversary.lr or rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=0.0,
        maximize=True,
    )
    for step in range(steps):
        below, above, _ = gradient(setting, weight, vector, step)
        _, at_zero, _ = gradient(setting, weight, torch.zeros_like(vector), step)
        if adversary.ascent == "adamw":
            vector.grad = above
            adamw.step()
        else:
            climbed = {
                "sgd": vector + adversary.lr * above,
                "sign": vector + adversary.lr * above.sign(),
                "linear": adversary.eps * at_zero.sign(),
            }
            vector.data = climbed[adversary.ascent].detach()
        vector.data = clipped(vector.detach(), adversary.norm, adversary.eps)
        if adversary.update == "sequential":  # the weights see the new perturbation
            below, _, _ = gradient(setting, weight, vector, step)
        weight = weight - rate * below
    return weight, vector.detach()


def after(setting: Setting, steps: int) -> tuple[Tensor, Tensor, PositionAdversary]:
    """Weight, perturbation and hook after `steps` of the loop."""
    hook = toy_hook(setting)
    trainer = toy_trainer(setting, hook)
    for _ in range(steps):
        trainer.train_step()
    return trainer.engine.full_weights()["weight"], hook.vector.detach(), hook


@pytest.mark.parametrize("balancing", BALANCING)
@pytest.mark.parametrize("micro_size", [8, 2])
@pytest.mark.parametrize("update", ["parallel", "sequential"])
@pytest.mark.parametrize("ascent", ASCENTS)
def test_the_loop_descends_and_ascends(ascent: str, update: str, micro_size: int, balancing: str) -> None:
    adversary = {**ASCENTS[ascent], "update": update}
    setting = Setting(adversary=adversary, micro_size=micro_size, tasks=2, balancer=BALANCING[balancing])
    weight, vector, _ = after(setting, 8)
    expected_weight, expected_vector = written_out(setting, 8)
    assert vector.abs().max() > 0.01
    torch.testing.assert_close(vector.double(), expected_vector, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.double(), expected_weight, rtol=1e-4, atol=1e-5)


def test_adamw_s_own_rate_follows_the_weights_schedule() -> None:
    """lr is at the peak: at half the weights' peak the first step, which is of the rate's size, is half as long."""
    moved = []
    for share in (1.0, 0.5):
        hook = toy_hook(Setting(adversary={"lr": 0.06, "eps": 1.0}, optimizer={"lr": 0.01}))
        hook.gradient = torch.full_like(hook.gradient, 3.0)
        hook.ascend(0.01 * share)
        moved.append(float(hook.vector.detach().mean()))
    assert moved == pytest.approx([0.06, 0.03], rel=1e-5)


def test_the_projection_was_at_work_in_the_case_above() -> None:
    _, vector, _ = after(Setting(adversary=SGD), 8)
    assert vector.abs().max() == pytest.approx(0.4)


@pytest.mark.parametrize("micro_size", [8, 2])
@pytest.mark.parametrize("balancing", BALANCING)
def test_linear_is_one_step_from_zero(micro_size: int, balancing: str) -> None:
    adversary = {"ascent": "linear", "update": "sequential", "eps": 0.1}
    setting = Setting(adversary=adversary, micro_size=micro_size, tasks=2, balancer=BALANCING[balancing])
    weight, vector, _ = after(setting, 4)
    expected_weight, expected_vector = written_out(setting, 4)
    assert vector.abs().tolist() == pytest.approx([0.1] * 6)
    torch.testing.assert_close(vector.double(), expected_vector, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(weight.double(), expected_weight, rtol=1e-4, atol=1e-6)


def test_the_two_updates_differ() -> None:
    """Otherwise the cases above would not tell them apart."""
    (one, _, _), (other, _, _) = (after(Setting(adversary={**SGD, "update": u}), 4) for u in ("parallel", "sequential"))
    assert (one - other).abs().max() > 1e-4


def test_lagged_weights_exist_before_the_adversary_s_own_pass() -> None:
    lagged = Setting(
        adversary={**SGD, "update": "sequential"},
        tasks=2,
        micro_size=2,
        balancer={"kind": "minimax", "estimate": "lagged"},
    )
    weight, vector, _ = after(lagged, 1)  # uniform at the first step
    expected_weight, expected_vector = written_out(dataclasses.replace(lagged, balancer={"kind": "uniform"}), 1)
    torch.testing.assert_close(vector.double(), expected_vector, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight.double(), expected_weight, rtol=1e-5, atol=1e-7)
    after(lagged, 3)


def test_the_micro_estimate_counts_the_weights_of_the_last_pass_only() -> None:
    micro = Setting(
        adversary={**SGD, "update": "sequential"},
        tasks=2,
        micro_size=2,
        balancer={"kind": "minimax", "estimate": "micro"},
    )
    trainer = toy_trainer(micro)
    trainer.train_step()
    (stats,) = trainer.history
    assert sum(stats.task_weights) == pytest.approx(1.0)


class NotFinite(Hook):
    """Makes the weights' gradient NaN while it is on; the adversary's own pass, if it has one, is done by then."""

    name = "not_finite"
    on = False

    def gradients(self, ctx: Any) -> None:
        for parameter in ctx.engine.module.parameters() if self.on else ():
            parameter.grad.fill_(math.nan)


@pytest.mark.parametrize("reason", ["loss", "gradient"])
@pytest.mark.parametrize("update", ["parallel", "sequential"])
@pytest.mark.parametrize("ascent", ASCENTS)
def test_a_skipped_step_changes_nothing(ascent: str, update: str, reason: str) -> None:
    hook = toy_hook(Setting(adversary={**ASCENTS[ascent], "update": update}))
    trainer = toy_trainer(Setting(adversary={**ASCENTS[ascent], "update": update}), hook)
    spoiler, module = NotFinite(), trainer.engine.module
    trainer.hooks.all = (hook, spoiler, trainer.hooks.balancer)
    trainer.train_step()
    before = hook.state_dict()["tensors"]
    spoiler.on, module.factor = reason == "gradient", math.nan if reason == "loss" else 1.0  # type: ignore[assignment]
    trainer.train_step()
    assert [stats.applied for stats in trainer.history] == [True, False]
    now = hook.state_dict()["tensors"]
    assert {name: value.tolist() for name, value in now.items()} == {k: v.tolist() for k, v in before.items()}
    spoiler.on, module.factor = False, 1.0  # type: ignore[assignment]
    trainer.train_step()
    assert not torch.equal(hook.state_dict()["tensors"]["vector"], before["vector"])


class Spoiled(Hook):
    """Overwrites the adversary's gradient just before it is read, as an overflow in it alone would."""

    name = "spoiled"

    def __init__(self, hook: PositionAdversary, value: float) -> None:
        self.hook, self.value = hook, value

    def gradients(self, ctx: Any) -> None:
        self.hook.gradient[1] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("ascent", ASCENTS)
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_is(ascent: str, value: float) -> None:
    """3e38 is finite, but its square is not, and AdamW would hold it for good; sgd and sign can take it."""
    setting = Setting(adversary=ASCENTS[ascent])
    hook = toy_hook(setting)
    trainer = toy_trainer(setting, hook)
    trainer.train_step()
    before = hook.state_dict()["tensors"]
    trainer.hooks.all = (hook, Spoiled(hook, value), trainer.hooks.balancer)
    trainer.train_step()
    after_it = hook.state_dict()["tensors"]
    if math.isfinite(value) and ascent != "adamw":
        assert all(tensor.isfinite().all() for tensor in after_it.values())
        return
    for name in set(before) - {"idle"}:
        assert torch.equal(after_it[name], before[name]), name
    trainer.hooks.all = (hook, trainer.hooks.balancer)
    trainer.train_step()
    assert not torch.equal(hook.vector.detach(), before["vector"]), "it goes on afterwards"


@pytest.mark.parametrize("ascent", [*ASCENTS, "linear"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_no_gradient_at_zero_makes_no_nan(ascent: str, norm: str) -> None:
    adversary = ASCENTS.get(ascent) or {"ascent": "linear"}
    setting = Setting(adversary={**adversary, "norm": norm, "update": "sequential"})
    trainer = toy_trainer(setting, hook := toy_hook(setting))
    module: Any = trainer.engine.module
    module.factor = 0.0
    trainer.train_step()
    assert torch.equal(hook.vector.detach(), torch.zeros(6))
    module.factor = 1.0
    trainer.train_step()
    assert hook.vector.isfinite().all() and hook.vector.abs().max() > 0


def test_the_engine_s_norm_and_clipping_are_the_weights_alone() -> None:
    setting = Setting(adversary=SGD, optimizer={"clipping": 1e-3})
    trainer = toy_trainer(setting, hook := toy_hook(setting))
    below, above, _ = gradient(setting, Toy(6).weight, torch.zeros(6), 0)
    trainer.train_step()
    (stats,) = trainer.history
    assert stats.grad_norm == pytest.approx(float(below.norm()), rel=1e-5)
    assert hook.vector.tolist() == pytest.approx(clipped(0.3 * above, "linf", 0.4).tolist(), rel=1e-5)


def test_the_perturbation_is_added_to_what_other_hooks_hand_over() -> None:
    setting = Setting(adversary=SGD)
    trainer = toy_trainer(setting, hook := toy_hook(setting))
    window = trainer.source.next_window()
    ctx = trainer.context(window, torch.zeros(1))
    micro = dataclasses.replace(window[0], extras={"other": torch.ones(1)})
    batch = hook.batch(ctx, micro)
    assert set(batch.extras) == {"other", "perturbation"} and set(micro.extras) == {"other"}
    assert batch.extras["perturbation"] is hook.vector


@pytest.mark.parametrize("update", ["parallel", "sequential"])
@pytest.mark.parametrize("ascent", ASCENTS)
def test_two_halves_are_the_whole_bit_for_bit(ascent: str, update: str) -> None:
    setting = Setting(adversary={**ASCENTS[ascent], "update": update}, optimizer={"kind": "adamw"}, tasks=2)
    whole = toy_trainer(setting, hook := toy_hook(setting))
    for _ in range(3):
        whole.train_step()
    state = hook.state_dict()
    weights, cursor = whole.engine.full_weights(), whole.source.cursor
    moments = {
        piece.name: {key: value.clone() for key, value in piece.tensors.items()} for piece in whole.engine.pieces()
    }
    for _ in range(3):
        whole.train_step()

    resumed = toy_trainer(setting, second := toy_hook(setting))
    second.load_state_dict(state)
    resumed.engine.create_optimizer_state()
    for piece in resumed.engine.pieces():
        for key, value in piece.tensors.items():
            value.copy_(moments[piece.name][key])
    resumed.engine.after_load(3)
    resumed.state.step, resumed.source.cursor = 3, cursor  # type: ignore[attr-defined]
    assert torch.equal(resumed.engine.full_weights()["weight"], weights["weight"])
    for _ in range(3):
        resumed.train_step()
    first, other = hook.state_dict()["tensors"], second.state_dict()["tensors"]
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(whole.engine.full_weights()["weight"], resumed.engine.full_weights()["weight"])


LONGER = PerturbationShape(kind="relative_coordinate", encoder=(4, 2))
IN_BOTH = PerturbationShape(kind="relative_coordinate", encoder=(3, 2), decoder=(1, 2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (Setting(adversary=SGD, shape=LONGER), r"encoder's part.*checkpoint \[3, 2\], now \[4, 2\]"),
        (Setting(adversary=SGD, shape=IN_BOTH), r"decoder's part.*checkpoint None, now \[1, 2\]"),
        (Setting(adversary={"ascent": "adamw"}), "--adversary.ascent: checkpoint sgd, now adamw"),
        (Setting(adversary={**SGD, "kind": "absolute_coordinate"}), "--adversary.kind"),
    ],
)
def test_another_adversary_s_state_is_refused_by_its_setting(changed: Setting, words: str) -> None:
    _, _, hook = after(Setting(adversary=SGD), 1)
    with pytest.raises(RefusedError, match=words):
        toy_hook(changed).load_state_dict(hook.state_dict())


def test_none_leaves_no_hook_at_all() -> None:
    config = Setting().config()
    config.adversary = make_settings("adversary", "none")
    assert built(stand_in_run(config), "adversary") is None


GRID = 7
SHAPE = PerturbationShape(kind="relative_coordinate", encoder=(3, 2), decoder=(1, 2))
VECTOR = [0.0, 0.5, 12.4, -12.5, 12.4, 3.0, -20.0, 20.0]
"""(row, column) of three encoder blocks and one of the decoder; beyond 6 + 6.33 all offsets of an axis are
clamped."""
LOST = [False, False, True, True, True, False, True, True]
"""The third block is lost along its rows alone."""


def saturation() -> Saturation:
    return Saturation(Balls(SHAPE, "linf", 20.0), GRID, CPU)  # type: ignore[arg-type]


def receives_gradient(offset: float) -> bool:
    """Whether anything of a random table comes back through the interpolation at this offset."""
    place = torch.tensor(offset, dtype=torch.float64, requires_grad=True)
    (node_weights(place, "relaxed") * torch.arange(7.0).square()).sum().backward()  # type: ignore[no-untyped-call]
    return bool(place.grad != 0)


def test_the_share_is_of_all_pairs_and_both_axes() -> None:
    clamped = pairs = 0
    for row, column in zip(VECTOR[::2], VECTOR[1::2], strict=True):
        for one in range(GRID**2):
            for other in range(GRID**2):
                for axis, shift in ((one // GRID - other // GRID, row), (one % GRID - other % GRID, column)):
                    clamped += not receives_gradient_at[axis + shift]
                    pairs += 1
    assert float(saturation().share(torch.tensor(VECTOR))) == pytest.approx(clamped / pairs)
    assert 0.3 < clamped / pairs < 0.9


receives_gradient_at = {
    offset + shift: receives_gradient(offset + shift) for offset in range(1 - GRID, GRID) for shift in VECTOR
}


def test_what_is_lost_is_what_no_gradient_comes_back_to() -> None:
    """Of a random table interpolated to all offsets of both axes; an axis is lost whatever the other does."""
    shifts = torch.tensor(VECTOR, dtype=torch.float64).view(-1, 2).requires_grad_()  # [L, 2]
    weights, numbers = grid_offsets(GRID, "relaxed", shifts, 1)  # [L, R, 50]
    table = torch.randn(BUCKETS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    pairs = (weights @ table).gather(1, numbers)  # [L, (2G - 1)^2 + 2]
    (pairs * torch.randn(pairs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))).sum().backward()  # type: ignore[no-untyped-call]
    assert saturation().lost(torch.tensor(VECTOR)).tolist() == LOST == (shifts.grad == 0).flatten().tolist()


@pytest.mark.parametrize(("on_saturation", "kept"), [("keep", True), ("reset", False)])
def test_a_lost_axis_starts_again_from_zero_with_its_moments(on_saturation: str, kept: bool) -> None:
    setting = Setting(adversary={"ascent": "adamw", "eps": 20.0, "on_saturation": on_saturation}, shape=SHAPE)
    hook = toy_hook(setting)
    trainer = toy_trainer(setting, hook)
    with torch.no_grad():
        hook.vector.copy_(torch.tensor(VECTOR))
    trainer.train_step()
    lost = torch.tensor(LOST)
    for tensor in (hook.vector.detach(), hook.state["exp_avg"], hook.state["exp_avg_sq"]):
        assert (tensor[~lost] != 0).all()
        assert (tensor[lost] != 0).all() if kept else (tensor[lost] == 0).all()
    assert int(hook.state["steps"]) == 1
    trainer.train_step()
    assert (hook.vector.detach()[lost].abs() < 1).all() is not kept
    assert hook.vector.isfinite().all() and math.isfinite(hook.metrics()["saturated"])


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
