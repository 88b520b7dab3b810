"""The hypergradient against automatic differentiation through the unrolled step, in float64; sign and scale of both
ways in which the encoder acts on the validation loss, each alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_hypergradients import Path, Update, agreement, exact, flat, update
from tests.synthetic_masks import MasksRun, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Masked, Rule, Weights, joined
from trp_scale.methods.learned_masks.masks import MaskedWindow

DOUBLE = torch.float64
FINE = {"difference": 1e-4}


def start(*, micro_size: int = 8, **changes: Any) -> MasksRun:
    """A run in float64 whose network, head and weights have already moved a little."""
    changes["multilevel"] = {**FINE, **changes.get("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, **changes), dtype=DOUBLE)


def copies(module: torch.nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


class Recorder:
    """The gradient that reaches the masking network, and what it was chosen with."""

    def __init__(self, run: MasksRun) -> None:
        assert run.hook is not None
        self.masker = run.hook.masker
        self.gradient: Weights = {}
        self.windows: list[MaskedWindow] = []
        self.own: Weights = {}
        check, outer_step = self.masker.network.check_gradients, self.masker.outer_step

        def check_gradients() -> Tensor:
            self.gradient = {n: p.grad.clone() for n, p in run.networks[0].named_parameters() if p.grad is not None}
            return check()

        def recorded(windows: Any, scale: float) -> bool:
            self.windows = [window for window, _ in windows]
            self.own = copies(run.networks[0])
            return outer_step(windows, scale)

        self.masker.network.check_gradients = check_gradients  # type: ignore[method-assign]
        self.masker.outer_step = recorded  # type: ignore[method-assign]

    def lower(self, number: int = 0) -> Masked:
        window = self.windows[number]
        embeddings = [each.embeddings for each in window.selections]
        return Masked(
            batch=joined(list(window.micros)),
            visible=torch.cat([each.visible for each in window.selections]),
            masked=torch.cat([each.masked for each in window.selections]),
            embeddings=torch.cat([each for each in embeddings if each is not None]),
        )


def held_adamw(state: dict[str, dict[str, Tensor]], step: int, lr: float, config: Any, decay: dict[str, float]) -> Rule:
    """AdamW whose second moment is what it becomes, held; `state` is of before the step, with "held" of after it."""
    beta1, beta2, eps = config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps

    def rule(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        mean = beta1 * state[name]["exp_avg"] + (1 - beta1) * gradient
        root = (state[name]["held"] / (1 - beta2**step)).sqrt() + eps
        return weight * (1 - lr * decay[name]) - lr * mean / (1 - beta1**step) / root

    return rule


def moments(optimizer: torch.optim.Optimizer, named: Any, key: str) -> dict[str, Tensor]:
    found = {}
    for name, parameter in named:
        state = optimizer.state.get(parameter, {})
        found[name] = state[key].clone() if key in state else torch.zeros_like(parameter)
    return found


def relative(found: Weights, expected: Weights) -> float:
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([value.flatten() for value in expected.values()])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"unroll": 1}},
        {"multilevel": {"unroll": 1, "pooling": "class", "network": "patchwise"}},
        {"multilevel": {"unroll": 1, "weights": "normalised"}},
        {"multilevel": {"unroll": 1}, "vision": {"tokens": "all", "positions": "relative"}},
    ],
)
def test_committed_steps_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    changes = {**settings, "multilevel": {**FINE, **settings["multilevel"]}}
    ours = update(Layout(micro_size=micro_size), changes, dtype=DOUBLE)
    assert relative(ours.gradient, exact([ours])) < 1e-6


CLOSE = 1e-3
SHARE = 0.1
"""Each path is at least this much of the whole, so that one that is wrong shows."""
SMALL = {"lr": 1e-6}
"""A learning rate of the encoder at which dL_val / dE is the same before and after a step."""


@lru_cache
def found(path: Path, network: str = "flattened", micro_size: int = 8, unroll: int = 1, **rates: float) -> Update:
    """Plain, float64."""
    optimizer = {name: rates.pop(name) for name in ("lr",) if name in rates}
    multilevel = {name: rates.pop(name) for name in ("head_lr",) if name in rates}
    changes: dict[str, Any] = {
        "multilevel": {"network": network, "unroll": unroll, "difference": 1e-4, **multilevel},
        "optimizer": optimizer,
    }
    return update(Layout(micro_size=micro_size), changes, path=path, dtype=torch.float64, **rates)


def apart(ours: Weights, theirs: Weights, factor: float) -> float:
    """How far ours is from factor x theirs, by the length of that."""
    expected = factor * flat(theirs)
    return float((flat(ours) - expected).norm() / expected.norm())


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize("network", ["flattened", "patchwise"])
@pytest.mark.parametrize("path", ["encoder", "head", "both"])
def test_each_path_has_the_direction_and_the_size_of_exact_differentiation(
    path: Path, network: str, micro_size: int, unroll: int
) -> None:
    ours = found(path, network, micro_size, unroll)
    theirs = exact([ours], path)
    measured = agreement(ours.gradient, theirs)
    assert measured.cosine == pytest.approx(1.0, abs=CLOSE)
    assert measured.ratio == pytest.approx(1.0, abs=CLOSE)
    assert flat(theirs).norm() >= SHARE * flat(exact([ours], "both")).norm()


@pytest.mark.parametrize("micro_size", [8, 4])
def test_the_whole_is_the_sum_of_both_paths(micro_size: int) -> None:
    """What was measured alone is what the hook adds up."""
    encoder, head, both = (flat(found(path, micro_size=micro_size).gradient) for path in ("encoder", "head", "both"))
    assert (encoder + head - both).norm() < 1e-5 * both.norm()


@pytest.mark.parametrize("path", ["encoder", "head", "both"])
def test_half_the_encoder_s_learning_rate_is_half_the_hypergradient(path: Path) -> None:
    whole, half = found(path, **SMALL), found(path, **SMALL, lr_factor=0.5)
    assert half.lr == whole.lr / 2
    assert apart(half.gradient, whole.gradient, 0.5) < CLOSE


def test_half_the_head_s_learning_rate_is_half_of_its_path_alone() -> None:
    rates = {**SMALL, "head_lr": 1e-5}
    for path, factor in (("head", 0.5), ("encoder", 1.0)):
        whole, half = found(path, **rates), found(path, **rates, head_lr_factor=0.5)  # type: ignore[arg-type]
        assert apart(half.gradient, whole.gradient, factor) < CLOSE, path


def test_a_head_that_does_not_learn_has_no_path() -> None:
    ours = found("both", head_lr=1e-12)
    measured = agreement(ours.gradient, exact([ours], "encoder"))
    assert measured.cosine == pytest.approx(1.0, abs=1e-6) and measured.ratio == pytest.approx(1.0, abs=1e-6)
