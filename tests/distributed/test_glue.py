"""GLUE on two ranks, and a run that is killed and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launched import finetune_until_killed
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import essence, lines
from tests.unit.finetuning.glue.small_data import finetune_here, glue_flags, write_cola, write_stsb

DEV = 21
"""Rows to measure on: not a multiple of two ranks' micro-batches of 4, so that filler rows end the last ones."""


def changes(text_dataset: Path, **others: Any) -> dict[str, Any]:
    tokenizer = text_dataset / "tokenizer"
    return {"downstream__tokenizer": tokenizer, "downstream__epochs": 0, "training__steps": 6, **others}


def result(run_dir: Path, task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / task / "seed_0" / "result.json").read_text())
    return found


def test_two_ranks_measure_what_one_does(two_ranks: Ranks, text_dataset: Path, tmp_path: Path) -> None:
    root = write_stsb(write_cola(tmp_path / "glue", 40, DEV), 40, DEV)
    # Weights that do not move: any difference is one of measuring.
    still = changes(text_dataset, training__steps=1, optimizer__lr=1e-30)
    finetune_here(glue_flags(root, tmp_path / "one", "cola,stsb", "scratch", **still))
    two_ranks(finetune_here, glue_flags(root, tmp_path / "two", "cola,stsb", "scratch", **still))
    for task in ("cola", "stsb"):
        one, two = result(tmp_path / "one", task), result(tmp_path / "two", task)
        assert one == two
        assert one["detail"]["all"]["rows"] == DEV
    assert result(tmp_path / "one", "stsb")["metrics"]["spearman"] not in (0.0, 1.0)


@pytest.mark.parametrize(
    "layout",
    always([{}, {"ds_config": "ds_configs/zero2.json"}], {"ds_config": "ds_configs/zero2.json"}),
    ids=["ddp", "zero2"],
)
def test_two_ranks_learn_what_one_does(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, layout: dict[str, str]
) -> None:
    """Invariant 1, rows that share sequences on one side included."""
    root = write_stsb(tmp_path / "glue", 40, DEV)
    plain = changes(text_dataset, model__dropout=0.0, downstream__dropout=0.0, downstream__padding="length")
    finetune_here(glue_flags(root, tmp_path / "one", "stsb", "scratch", **plain, batch__micro_size=8))
    split = {**plain, **layout, "downstream__padding": "none", "batch__micro_size": 2}
    two_ranks(finetune_here, glue_flags(root, tmp_path / "two", "stsb", "scratch", **split))
    one, two = (lines(tmp_path / name / "stsb" / "seed_0") for name in ("one", "two"))
    assert len(one) == 6 and one[-1]["loss"] < one[0]["loss"]
    for line, other in zip(one, two, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), line["step"]
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), line["step"]
    figures = [result(tmp_path / name, "stsb")["metrics"] for name in ("one", "two")]
    assert figures[0] == pytest.approx(figures[1], abs=1e-3)


@pytest.mark.exhaustive
def test_kill_9_at_a_random_step_and_go_on(text_dataset: Path, tmp_path: Path) -> None:
    root = write_cola(tmp_path / "glue", 60, DEV)
    many = changes(text_dataset, training__steps=60, checkpoint__every=2, model__dropout=0.1, optimizer__lr=1e-3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finetune_here(glue_flags(root, whole, "cola", "scratch", **many))
    command = glue_flags(root, killed, "cola", "scratch", **many)
    finetune_until_killed(command, killed / "cola" / "seed_0", 60)
    assert finetune_here(command) == 0
    runs = [[essence(line) for line in lines(run_dir / "cola" / "seed_0")] for run_dir in (whole, killed)]
    assert runs[0] == runs[1] and len(runs[0]) == 60
    assert result(whole, "cola") == result(killed, "cola")
