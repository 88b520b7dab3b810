"""A fault, as the loop takes note of it, and the checkpoint from before it, which stays."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.runs import flags, pretrain_here
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints
from trp_scale.engines.plain import PlainEngine
from trp_scale.training.loop import CALM_STEPS, TrainingState


@pytest.mark.parametrize(
    ("skipped", "steps", "fault"),
    [
        ([], 5, 0),
        ([3], 5, 3),
        ([3, 4, 60], 100, 3),
        ([3], 2 + CALM_STEPS, 3),
        ([3], 3 + CALM_STEPS, 0),
        ([3, 60], 59 + CALM_STEPS, 3),
        ([3, 300], 301, 300),
    ],
)
def test_a_fault_begins_with_a_skipped_step_and_ends_after_calm_ones(
    skipped: list[int], steps: int, fault: int
) -> None:
    state = TrainingState()
    for step in range(1, steps + 1):
        state.record_step(step, skipped=step in skipped)
    assert (state.fault, state.skipped) == (fault, len(skipped))


def test_the_last_checkpoint_from_before_a_fault_stays(text_dataset: Path, tmp_path: Path) -> None:
    """Also when the run is started again and again: each start makes a step and a checkpoint."""
    changes = {"checkpoint__every": 2, "checkpoint__keep": 1, "training__steps": 40, "training__max_skipped_steps": 3}
    original, made = PlainEngine.check_gradients, [0]

    def spoils(engine: PlainEngine) -> Tensor:
        made[0] += 1
        norm = original(engine)
        return torch.full_like(norm, torch.nan) if made[0] > 7 else norm

    with mock.patch.object(PlainEngine, "check_gradients", spoils):
        for _ in range(3):
            assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == 3
            left = [step for step, _ in checkpoints(tmp_path)]
            assert left[0] == 6 and len(left) == 2, "step 8 is the first that was skipped"
    assert read_document(checkpoint_path(tmp_path, left[-1])).extra["fault"][0] == 8
