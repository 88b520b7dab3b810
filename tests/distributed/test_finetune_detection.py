"""Fine-tuned detectors: two ranks measure and learn what one does on every engine, and a run goes on exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engine_layouts import ENGINE_FLAGS
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import essence, lines
from tests.unit.finetuning.detection.small_sets import small_scenes
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli

SMALL: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "crops.size": 64,
    "data.workers": 0,
    "data.validation_fraction": 0.5,
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "downstream.epochs": 0,
    "downstream.warmup_share": 0,
    "optimizer.schedule": "constant",
    "training.steps": 2,
    "detection.width": 16,
    "detection.box_width": 32,
    "detection.train_proposals": 50,
    "detection.test_proposals": 50,
    "detection.score_threshold": 0.0,
    "detection.min_scale": 0.5,
    "detection.max_scale": 1.5,
    "logging.every": 1,
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_scenes(tmp_path_factory.mktemp("detection") / "scenes", count=24)


@pytest.fixture(scope="module")
def alone(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    assert finetune_here(scenes, run_dir) == 0
    return run_dir


def finetune_here(scenes: Path, run_dir: Path, **changes: Any) -> int:
    """In this process, or on shared ranks."""
    values = {**SMALL, "data.path": scenes, "run_dir": run_dir}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return cli.main(["finetune", "--recipe", "detection_tiny", "--from", "scratch", *flags])


def seed_directory(run_dir: Path) -> Path:
    return run_dir / "detection" / "seed_0"


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((seed_directory(run_dir) / "result.json").read_text())
    return found


def test_two_ranks_measure_what_one_does(two_ranks: Ranks, scenes: Path, tmp_path: Path) -> None:
    """The weights do not move; the held-out images do not fill the last micro-batches of two ranks."""
    still = {"training__steps": 1, "optimizer__lr": 1e-30, "batch__micro_size": 4}
    assert finetune_here(scenes, tmp_path / "one", **still) == 0
    assert two_ranks(finetune_here, scenes, tmp_path / "two", **still) == [0, 0]
    one = result(tmp_path / "one")
    assert one == result(tmp_path / "two")
    assert one["metrics"]["AP"] > 0 and "mask_AP" in one["metrics"], "by chance, but more than nothing"


@pytest.mark.parametrize("layout", always(["fsdp", "zero2", "zero3"], "fsdp"))
def test_two_ranks_learn_what_one_does_in_micro_batches_of_one_size(
    two_ranks: Ranks, scenes: Path, alone: Path, tmp_path: Path, layout: str
) -> None:
    assert two_ranks(finetune_here, scenes, tmp_path, **ENGINE_FLAGS[layout]) == [0, 0]
    ours, reference = (lines(seed_directory(run)) for run in (tmp_path, alone))
    assert [line["step"] for line in ours] == [1, 2]
    for line, other in zip(ours, reference, strict=True):
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for task, values in other["tasks"].items():
            assert line["tasks"][task]["loss"] == pytest.approx(values["loss"], rel=1e-4), task
            assert line["tasks"][task]["count"] == values["count"] == 8


@pytest.mark.exhaustive
def test_a_run_goes_on_bit_for_bit(scenes: Path, tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    settings = {"training__steps": 4, "checkpoint__every": 2}
    assert finetune_here(scenes, whole, **settings) == 0
    shutil.copytree(whole, again)
    shutil.rmtree(checkpoint_path(seed_directory(again), 4))
    (seed_directory(again) / "result.json").unlink()
    assert finetune_here(scenes, again, **settings) == 0
    ours, reference = (lines(seed_directory(run)) for run in (again, whole))
    assert [essence(line) for line in ours] == [essence(line) for line in reference]
    assert ours[-1] != reference[-1], "times differ where the steps were made again"
    assert result(again) == result(whole)
