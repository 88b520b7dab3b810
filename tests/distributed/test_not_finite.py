"""A loss or gradient that is not finite on one rank moves nobody's weights, on every engine, and a skipped step leaves
nothing behind."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.checkpoints import unequal
from tests.distributed.test_engine_contract import after_two_steps
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import TWO_RANKS, Layout, data_group, small_config, trainer_for
from trp_scale.core.batch import TaskLosses

LAYOUTS = {
    "plain": Layout(),
    **TWO_RANKS,
    "zero2_offload": Layout(
        engine="deepspeed",
        stage=2,
        document={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
}
SPOILT_STEP = 2


class SpoilsOneGradient(torch.autograd.Function):
    """Identity forward, NaN backward: the loss stays finite, the gradient does not."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.full_like(gradient, torch.nan)


def spoilt_run(layout: Layout, what: str) -> tuple[list[bool], dict[str, float], int]:
    """Four steps; the last rank spoils step SPOILT_STEP. Returns (applied by step, distances, optimizer steps)."""
    config = small_config(layout, training={"steps": 4, "max_skipped_steps": 10})
    trainer = trainer_for(layout, config)
    last = data_group().rank == data_group().size - 1

    def spoil(losses: TaskLosses) -> TaskLosses:
        if not (last and trainer.state.step == SPOILT_STEP):
            return losses
        return replace(losses, sums=losses.sums * torch.nan if what == "loss" else SpoilsOneGradient.apply(losses.sums))

    trainer.spoil(spoil)
    before: dict[str, torch.Tensor] = {}
    distances: dict[str, float] = {}
    for step in range(config.training.steps):
        if step in (SPOILT_STEP, SPOILT_STEP + 1):
            before = trainer.engine.full_weights()
        trainer.train_step()
        if step in (SPOILT_STEP, SPOILT_STEP + 1):
            after = trainer.engine.full_weights()
            distances[str(step)] = sum(float((after[name] - before[name]).abs().sum()) for name in after)
    applied = [stats.applied for stats in trainer.history]
    steps = trainer.engine.optimizer_steps()
    trainer.engine.close()
    return applied, distances, steps


@pytest.mark.parametrize(
    ("layout", "what"),
    always(
        product(LAYOUTS, ["loss", "gradient"]),
        *(("plain", "loss"), ("ddp", "gradient"), ("fsdp", "loss"), ("zero2", "gradient"), ("zero3", "loss")),
    ),
)
def test_nobody_moves_and_the_run_goes_on(two_ranks: Ranks, layout: str, what: str) -> None:
    answers = two_ranks.run_layout(spoilt_run, LAYOUTS[layout], what)
    for applied, _, steps in answers:
        assert applied == [True, True, False, True]
        assert steps == 3
    distances = answers[0][1]
    assert distances[str(SPOILT_STEP)] == 0.0
    assert distances[str(SPOILT_STEP + 1)] > 0.0


def skipping_run(layout: Layout) -> tuple[str, int]:
    config = small_config(layout, training={"steps": 6, "max_skipped_steps": 1}, optimizer={"lr": 1e-3})
    trainer = trainer_for(layout, config)
    saved: list[int] = []
    trainer.control.save = lambda: saved.append(trainer.state.step)
    trainer.spoil(lambda losses: replace(losses, sums=losses.sums * torch.nan))
    reason = trainer.run()
    trainer.engine.close()
    return reason, saved[-1]


def test_too_many_skipped_steps_stop_the_run_with_a_checkpoint() -> None:
    reason, saved = skipping_run(Layout())
    assert "3 steps skipped" in reason and "--training.max_skipped_steps allows 1" in reason
    assert saved == 3, "the second is read when the third is queued"


ADDED_TO: dict[str, tuple[str, dict[str, Any]]] = {
    "offload": ("fp32", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "fp32 sums": ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
}
"""Precision and DeepSpeed's configuration where the sums of a window begin with what is there."""


@pytest.mark.parametrize(("stage", "what"), [(1, "offload"), (2, "offload"), (2, "fp32 sums")])
def test_a_skipped_step_leaves_no_trace_where_zero_1_or_2_adds_to_what_it_finds(
    two_ranks: Ranks, stage: int, what: str
) -> None:
    """Without offload and with sums in the type of the weights, what a skip left could not be told from the weights:
    DeepSpeed sums a window in `param.grad`, `param.grad_accum` or `all_grad_tensors`, hands the sums over to
    `averaged_gradients` at its end, where they replace what was there, and empties the former. Two settings add to
    what they find: offload, unless `micro_step_id` was set back, and stage 2 with fp32 sums of bf16 gradients."""
    precision, document = ADDED_TO[what]
    layout = Layout(engine="deepspeed", stage=stage, document=deepcopy(document))
    layout.document.setdefault("zero_optimization", {})["stage"] = stage
    expected = two_ranks(after_two_steps, layout, precision)
    for found, wanted in zip(two_ranks(after_two_steps, layout, precision, disturbed=True), expected, strict=True):
        assert found[1] == wanted[1]
        assert unequal(found[0], wanted[0]) == []
