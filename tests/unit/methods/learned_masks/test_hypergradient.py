"""The hypergradient against automatic differentiation through the unrolled step, in float64 (issue line 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_masks import D_TR, D_VAL, MasksRun, labelled, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import Masked, Rule, Weights, hypergradient, joined
from trp_scale.core.batch import Batch
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


def sides(run: MasksRun) -> Iterator[tuple[str, Tensor]]:
    yield from run.model.named_parameters()


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


def committed(settings: dict[str, Any], *, micro_size: int, cycles: int = 2, **kind: Any) -> tuple[Weights, Weights]:
    """(ours, exact) hypergradient at the end of the last of some cycles."""
    run = start(micro_size=micro_size, **settings)
    assert run.hook is not None
    engine: Any = run.engine
    recorder, config, unroll = Recorder(run), run.trainer.config, run.trainer.config.multilevel.unroll
    for _ in range(cycles * unroll - 1):
        run.trainer.train_step()
    head: Any = run.hook.outer.level.head  # type: ignore[attr-defined]
    weights, named = copies(run.model), list(run.model.named_parameters())
    before = moments(engine.optimizer, named, "exp_avg")
    own_head = (head.own.weight.detach().clone(), head.own.bias.detach().clone())
    head_before = moments(head.optimizer, head._names(), "exp_avg")
    size = config.batch.global_size
    first = (cycles - 1) * size
    run.trainer.train_step()
    lr = run.trainer.history[-1].lr  # type: ignore[attr-defined]
    after = moments(engine.optimizer, named, "exp_avg_sq")
    head_after = moments(head.optimizer, head._names(), "exp_avg_sq")
    decay = {name: config.optimizer.weight_decay if value.ndim > 1 else 0.0 for name, value in named}
    head_decay = {"weight": config.multilevel.head_weight_decay, "bias": 0.0}
    state = {name: {"exp_avg": before[name], "held": after[name]} for name in before}
    head_state = {name: {"exp_avg": head_before[name], "held": head_after[name]} for name in head_before}
    exact = hypergradient(
        run.model,
        weights,
        run.networks[0],
        recorder.own,
        own_head,
        lower=[recorder.lower()],
        train=labelled(range(D_TR + first, D_TR + first + size)),
        validation=labelled(range(D_VAL + first, D_VAL + first + size)),
        encoder_rule=held_adamw(state, cycles * unroll, lr, config, decay),
        head_rule=held_adamw(
            head_state, cycles, config.multilevel.head_lr * lr / config.optimizer.lr, config, head_decay
        ),
        pooling=config.multilevel.pooling,
        normalise=config.multilevel.weights == "normalised",
        **kind,
    )
    return recorder.gradient, exact


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
    ours, exact = committed(settings, micro_size=micro_size)
    assert relative(ours, exact) < 1e-6


def batch_of(*batches: Batch) -> Batch:
    return joined(list(batches))
