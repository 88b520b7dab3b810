"""Invariant 1 for joint steps and for a fine-tuned second encoder: the same run however the global batch is split."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.engine_layouts import LAYOUTS
from tests.grids import always
from tests.parity.compare import run_alone, too_far, way_apart
from tests.ranks import Ranks
from tests.synthetic_masks import MasksResult, run_masks

STEPS = 5
UNROLL = 2
LEVELS: dict[str, dict[str, Any]] = {
    "joint": {"kind": "joint", "gamma": 0.5, "batch_size": 12},
    "fine_tuning": {"kind": "fine_tuning", "proximity": 20.0},
}
ACCUMULATION = {"plain": 1, "ddp": 2, "fsdp": 2, "zero2": 1, "zero3": 2, "zero3_offload": 1}
"""Micro-batches of D_u on each rank, by engine; DeepSpeed believes that a window holds no more than these."""
DIFFERENCE = 1.0
"""Long, so that what fp32 rounds of a difference of losses does not hide how near the runs are."""


def changes(level: str, accumulation: int) -> dict[str, Any]:
    """D_tr and D_val have a micro-batch less than D_u on each rank, where those are several."""
    size, split = LEVELS[level].get("batch_size", 8), max(1, accumulation // 2)
    own = {"unroll": UNROLL, "difference": DIFFERENCE, "micro_size": size // 2 // split, **LEVELS[level]}
    return {"multilevel": own, "training": {"steps": STEPS}, "optimizer": {"clipping": 1.0}}


def head_of(result: MasksResult) -> dict[str, Tensor]:
    return {name: state["value"] for name, state in result.head.items()}


def encoder_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what the second encoder's features do not depend on: an engine may let it decay or not."""
    return {
        name: value for name, value in weights.items() if not name.startswith(("decoder_", "prediction.", "mask_token"))
    }


@pytest.mark.parametrize(
    ("level", "engine"),
    always(
        product(LEVELS, ACCUMULATION),
        ("joint", "plain"),
        ("fine_tuning", "ddp"),
        ("joint", "fsdp"),
        ("fine_tuning", "zero2"),
    ),
)
def test_every_split_gives_the_same_run(two_ranks: Ranks, level: str, engine: str) -> None:
    layout = replace(LAYOUTS[engine], micro_size=(8 if engine == "plain" else 4) // ACCUMULATION[engine])
    agree(two_ranks.run_layout(run_masks, layout, changes(level, ACCUMULATION[engine]))[0], level)


def agree(ours: MasksResult, level: str) -> None:
    theirs: MasksResult = run_alone(run_masks, changes(level, 4))
    assert ours.moved and too_far(ours, theirs) == []
    assert way_apart(ours.network, theirs.network, theirs.network_initial) < 1e-4
    zeros = {name: torch.zeros_like(value) for name, value in head_of(theirs).items()}
    assert way_apart(head_of(ours), head_of(theirs), zeros) < 1e-5
    for step, (mine, other) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        assert mine.task_losses == pytest.approx(other.task_losses, rel=1e-5), step
    if level == "fine_tuning":
        pair = encoder_of(ours.tuned), encoder_of(theirs.tuned)
        assert way_apart(*pair, encoder_of(theirs.initial)) < 1e-4
