"""The plain engine, the reference of all others, against AdamW written out in float64 and torch's own clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engines.linear_model import Small, engine_of, gradients, push, state_of, weights_of
from tests.unit.models.masked_rows import VOCABULARY, masked_rows, small_model
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import FlatRange
from trp_scale.distributed.groups import Group
from trp_scale.engines.optimizer import decay_groups
from trp_scale.engines.plain import PlainEngine

SETTINGS: dict[str, Any] = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.3}
RATES = [0.1, 0.02, 0.3, 0.05]


class AdamWByHand:
    """Loshchilov and Hutter's Algorithm 2 in float64, with decay of matrices alone."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.first = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.second = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.steps = 0

    def step(self, found: dict[str, Tensor], lr: float, beta1: float, beta2: float, eps: float, decay: float) -> None:
        self.steps += 1
        for name, weight in self.weights.items():
            gradient = found[name].double()
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
            mean = self.first[name] / (1 - beta1**self.steps)
            square = self.second[name] / (1 - beta2**self.steps)
            shrink = decay if name == "dense.weight" else 0.0
            self.weights[name] = weight - lr * (mean / (square.sqrt() + eps) + shrink * weight)


@pytest.mark.parametrize("parts", [1, 3])
def test_adamw_is_the_algorithm_with_decay_of_matrices_alone(parts: int) -> None:
    engine = engine_of(**SETTINGS)
    by_hand = AdamWByHand(weights_of(engine))
    for number, lr in enumerate(RATES):
        wanted = gradients(number, engine.module)
        push(engine, wanted, parts)
        engine.step(lr)
        by_hand.step(wanted, lr, 0.8, 0.95, 1e-3, 0.3)
        for name, weight in weights_of(engine).items():
            found = weight.double()
            torch.testing.assert_close(found, by_hand.weights[name], rtol=1e-5, atol=1e-6, msg=f"{number}: {name}")
    state = state_of(engine)
    for kind, moments in (("exp_avg", by_hand.first), ("exp_avg_sq", by_hand.second)):
        for name, moment in moments.items():
            torch.testing.assert_close(state[f"{name}/{kind}"].double(), moment.flatten(), rtol=1e-5, atol=1e-6)
    assert engine.optimizer_steps() == len(RATES)


def test_biases_and_norms_of_bert_are_not_decayed_and_all_matrices_are() -> None:
    model = small_model()
    decayed, kept = decay_groups(model.named_parameters(), 0.01)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.01, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
    for parameter in kept["params"]:
        assert names[id(parameter)].endswith(("bias", "LayerNorm.weight"))
    for parameter in decayed["params"]:
        assert not names[id(parameter)].endswith("bias") and "LayerNorm" not in names[id(parameter)]


def test_sgd_is_the_weight_minus_rate_times_gradient() -> None:
    """No decay and no momentum either: it checks gradients."""
    engine = engine_of(kind="sgd", weight_decay=0.5)
    expected = {name: weight.double() for name, weight in weights_of(engine).items()}
    for number, lr in enumerate(RATES):
        wanted = gradients(number, engine.module)
        push(engine, wanted)
        engine.step(lr)
        expected = {name: weight - lr * wanted[name].double() for name, weight in expected.items()}
    for name, weight in weights_of(engine).items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [0.05, 1.0, 1e6])
def test_clipping_is_torchs_own(limit: float) -> None:
    engine, reference = engine_of(kind="sgd", clipping=limit), Small()
    wanted = gradients(0, reference)
    for name, parameter in reference.named_parameters():
        parameter.grad = wanted[name].clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
    before = weights_of(engine)
    norm = push(engine, wanted)
    assert float(norm) == pytest.approx(float(expected_norm), rel=1e-6), "the norm that is reported is before clipping"
    engine.step(1.0)
    moved = 0.0
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        change = before[name].double() - weights_of(engine)[name].double()
        torch.testing.assert_close(change, parameter.grad.double(), rtol=1e-4, atol=1e-5)
        moved += float(change.square().sum())
    assert math.sqrt(moved) == pytest.approx(min(limit, float(norm)), rel=1e-4)


def test_no_clipping_when_it_is_off() -> None:
    engine = engine_of(kind="sgd", clipping=0.0)
    before, wanted = weights_of(engine), gradients(0, engine.module, scale=100.0)
    push(engine, wanted)
    engine.step(1.0)
    for name, weight in weights_of(engine).items():
        torch.testing.assert_close(before[name] - weight, wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(poison: float) -> None:
    engine = engine_of()
    wanted = gradients(0, engine.module)
    wanted["LayerNorm.bias"][1] = poison
    assert not bool(push(engine, wanted).isfinite())


def test_a_skip_leaves_weights_and_moments_and_drops_the_gradient() -> None:
    skipping, other = engine_of(**SETTINGS), engine_of(**SETTINGS)
    for engine in (skipping, other):
        push(engine, gradients(0, engine.module))
        engine.step(0.1)
    before = state_of(skipping)
    wanted = gradients(1, skipping.module)
    wanted["dense.weight"][0, 0] = math.nan
    push(skipping, wanted)
    skipping.skip()
    assert_same_state(state_of(skipping), before)
    assert skipping.optimizer_steps() == 1
    for engine in (skipping, other):
        push(engine, gradients(2, engine.module))
        engine.step(0.1)
    assert_same_state(state_of(skipping), state_of(other))


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon", "sgd"])
def test_an_engine_that_decides_on_the_host_does_not_ask_the_device_again(kind: str) -> None:
    """Weights that are offloaded lie on another device than the answer."""
    engine = engine_of(kind=kind)
    engine.decides_on_host = True
    engine._steps = engine._steps.to("meta")
    before = weights_of(engine)
    push(engine, gradients(0, engine.module))
    engine.step(0.1, torch.ones((), dtype=torch.bool, device="meta"))
    assert all(not torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon", "sgd"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_the_device_leaves_out_is_a_skip(kind: str, first: bool) -> None:
    """Also as the very first step, which makes the moments; and the count of steps goes on from a checkpoint's."""
    deciding, skipping = (engine_of(**{**SETTINGS, "kind": kind}) for _ in range(2))
    for engine in (deciding, skipping):
        engine.create_optimizer_state()
        engine.after_load(0 if first else 7)
        if not first:
            push(engine, gradients(0, engine.module))
            engine.step(0.1, torch.tensor(True))
    wanted = gradients(1, skipping.module)
    wanted["dense.weight"][0, 0] = math.nan
    for engine in (deciding, skipping):
        push(engine, wanted)
    deciding.step(0.1, torch.tensor(False))
    skipping.skip()
    assert_same_state(state_of(deciding), state_of(skipping))
    assert deciding.optimizer_steps() == skipping.optimizer_steps() == (0 if first else 8)
    for engine in (deciding, skipping):
        push(engine, gradients(2, engine.module))
        engine.step(0.1)
    assert_same_state(state_of(deciding), state_of(skipping))
    assert [float(state["step"]) for state in deciding.optimizer.state.values() if "step" in state] == [
        float(state["step"]) for state in skipping.optimizer.state.values() if "step" in state
    ]


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def transplant(source: PlainEngine, target: PlainEngine) -> None:
    """Weights and moments through pieces(), as a checkpoint does it."""
    target.create_optimizer_state()
    state = state_of(source)
    for piece in target.pieces():
        for kind, tensor in piece.tensors.items():
            tensor.copy_(state[f"{piece.name}/{kind}"])


def changed_weights() -> Small:
    module = Small()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(7.0)
    return module


def two_more_steps(engine: PlainEngine) -> dict[str, Tensor]:
    for number, lr in ((10, 0.2), (11, 0.1)):
        push(engine, gradients(number, engine.module))
        engine.step(lr)
    return state_of(engine)


@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_restored_engine_goes_on_bit_for_bit(done: int) -> None:
    original = engine_of(**SETTINGS)
    original.create_optimizer_state()
    for number, lr in enumerate(RATES[:done]):
        push(original, gradients(number, original.module))
        original.step(lr)
    restored, wrong = engine_of(changed_weights(), **SETTINGS), engine_of(changed_weights(), **SETTINGS)
    transplant(original, restored)
    restored.after_load(done)
    transplant(original, wrong)
    wrong.after_load(done + 1)
    assert restored.optimizer_steps() == done
    assert_same_state(state_of(restored), state_of(original))
    expected = two_more_steps(original)
    assert_same_state(two_more_steps(restored), expected)
    assert restored.optimizer_steps() == done + 2
    other = two_more_steps(wrong)  # the step count is part of the state
    assert not torch.equal(other["dense.weight/weight"], expected["dense.weight/weight"])


def test_state_that_is_made_before_the_first_step_changes_nothing() -> None:
    fresh, prepared = engine_of(**SETTINGS), engine_of(**SETTINGS)
    prepared.create_optimizer_state()
    assert not any(tensor.any() for name, tensor in state_of(prepared).items() if not name.endswith("/weight"))
    assert_same_state(two_more_steps(prepared), two_more_steps(fresh))


def test_pieces_cover_every_parameter_once() -> None:
    engine = engine_of()
    engine.create_optimizer_state()
    pieces = list(engine.pieces())
    named = dict(engine.module.named_parameters())
    assert [piece.name for piece in pieces] == list(named)
    for piece in pieces:
        assert piece.region == FlatRange(0, named[piece.name].numel()) and piece.owner
        assert piece.shape == tuple(named[piece.name].shape)
        assert set(piece.tensors) == {"weight", "exp_avg", "exp_avg_sq"}
        assert all(tensor.dtype == torch.float32 and tensor.ndim == 1 for tensor in piece.tensors.values())
        piece.tensors["weight"].fill_(3.0)
    assert all((parameter == 3.0).all() for parameter in named.values())


def test_full_weights_are_copies_by_name() -> None:
    engine = engine_of()
    before = weights_of(engine)
    full = engine.full_weights()
    assert set(full) == set(before) and all(torch.equal(full[name], before[name]) for name in before)
    full["dense.weight"].zero_()
    assert torch.equal(weights_of(engine)["dense.weight"], before["dense.weight"])


def test_bf16_computes_in_bf16_over_fp32_weights() -> None:
    batch, exact = masked_rows(4), small_model()
    engine = engine_of(small_model(), precision="bf16")
    arguments = (batch["tokens"], batch["token_types"], batch["attention_mask"], batch["masked_positions"])
    found, expected = engine(*arguments).prediction_logits, exact(*arguments).prediction_logits
    assert found.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in engine.module.parameters())
    difference = (found.float() - expected)[..., :VOCABULARY].detach().abs().max()
    assert 1e-4 < float(difference) < 0.3
    fp32 = engine_of(small_model())(*arguments).prediction_logits
    assert torch.equal(fp32, expected)


def test_dropout_follows_train() -> None:
    batch = masked_rows(4)
    engine = engine_of(small_model(dropout=0.5))
    arguments = (batch["tokens"], batch["token_types"], batch["attention_mask"], batch["masked_positions"])
    for mode in (True, False):
        engine.train(mode)
        same = torch.equal(engine(*arguments).prediction_logits, engine(*arguments).prediction_logits)
        assert same == (not mode)


def test_what_the_plain_engine_cannot_do_is_refused() -> None:
    with pytest.raises(EngineError, match=r"fp16 needs --ds_config"):
        engine_of(precision="fp16")
    config = engine_of().config
    with pytest.raises(EngineError, match=r"one rank, 4 found; use --engine fsdp"):
        PlainEngine(Small(), config, device=torch.device("cpu"), data_group=Group("data", rank=0, size=4))
