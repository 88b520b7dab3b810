"""Runs that end by themselves: the status of each, and what stop.json says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import flags, pretrain_here
from trp_scale import cli
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.core.batch import Batch
from trp_scale.data.index import DataError
from trp_scale.distributed.groups import Group
from trp_scale.training.agreement import StepAgreement


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "stop.json").read_text())
    return found


def test_too_many_steps_that_are_not_finite_end_with_status_3(text_dataset: Path, tmp_path: Path) -> None:
    changes = {"optimizer__lr": 1e30, "optimizer__warmup_steps": 0, "training__max_skipped_steps": 2}
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=20, **changes)) == 3
    found = record(tmp_path)
    assert (found["status"], found["again"]) == (3, False)
    assert "steps skipped, --training.max_skipped_steps allows 2" in found["why"]
    assert [step for step, _ in checkpoints(tmp_path)] == [found["step"]]
    assert found["step"] < 20


def test_a_mistake_of_the_user_ends_with_status_2(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=1)) == 0
    changed = flags(text_dataset, tmp_path, training__steps=2, optimizer__lr=0.5)
    assert cli.main(["pretrain", *changed]) == 2
    assert "error: the checkpoint was made with other settings" in capsys.readouterr().err
    found = record(tmp_path)
    assert (found["status"], found["again"]) == (2, False)
    assert "optimizer.lr" in found["why"]


def test_unreadable_blocks_in_step_after_step_are_the_storage() -> None:
    agreement = StepAgreement(Group("world"), max_corrupt_blocks=1000, max_corrupt_steps=3)

    def step(*keys: str) -> None:
        batch = Batch(fields={"row_weights": torch.ones(1)}, keys=torch.zeros(1, dtype=torch.int64), start=0)
        batch.corrupt = list(keys)
        agreement.reach(torch.zeros(1, dtype=torch.float64), [batch], stop=False)

    for number in range(3):
        step(f"block {number}")
    step()  # one that could be read
    for number in range(3, 6):
        step(f"block {number}")
    with pytest.raises(DataError, match=r"4 steps in a row met unreadable blocks.*max_corrupt_steps allows 3"):
        step("block 6")
