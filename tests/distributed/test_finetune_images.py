"""Fine-tuned classifiers: two ranks measure and learn what one does, and a run that is killed goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launched import descendants, finetune_until_killed, wait_for_steps
from tests.fixtures import small_image_dataset
from tests.ranks import Ranks
from tests.runs import essence, lines, start
from tests.unit.finetuning.test_finetune import tuning_flags
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli

STRONG: dict[str, Any] = {
    "augmentation.magnitude": 9,
    "augmentation.erasing": 0.25,
    "augmentation.mixup": 0.8,
    "augmentation.cutmix": 1.0,
    "augmentation.smoothing": 0.1,
    "augmentation.measured": "centre",
    "downstream.epochs": 0,
    "optimizer.schedule": "constant",
    "logging.every": 1,
}


def flags(dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    return tuning_flags(dataset, run_dir, "scratch", **{**STRONG, **changes})


def finetune_here(arguments: list[str]) -> int:
    """In this process, or on shared ranks."""
    return cli.main(["finetune", *arguments])


def seed_directory(run_dir: Path) -> Path:
    return run_dir / "classification" / "seed_0"


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((seed_directory(run_dir) / "result.json").read_text())
    return found


def test_two_ranks_measure_what_one_does(two_ranks: Ranks, image_dataset: Path, tmp_path: Path) -> None:
    """The weights hardly move, so that any difference is one of measuring; the last micro-batches are not full."""
    test_set = small_image_dataset(tmp_path / "test", count=21, seed=1)
    still = {"training__steps": 1, "optimizer__lr": 1e-30, "batch__micro_size": 4, "downstream__test_path": test_set}
    assert finetune_here(flags(image_dataset, tmp_path / "one", **still)) == 0
    assert two_ranks(finetune_here, flags(image_dataset, tmp_path / "two", **still)) == [0, 0]
    one, two = result(tmp_path / "one"), result(tmp_path / "two")
    assert one == two
    assert sum(each["images"] for each in one["detail"]["classes"].values()) == 21


@pytest.mark.parametrize(
    "layout",
    [{"engine": "fsdp"}, {"ds_config": "ds_configs/zero3.json"}],
    ids=lambda layout: next(iter(layout.values())),
)
def test_two_ranks_learn_what_one_does(
    two_ranks: Ranks, image_dataset: Path, tmp_path: Path, layout: dict[str, str]
) -> None:
    """Invariant 1 with every augmentation: images are mixed with the same neighbours however the batch is split."""
    # Drop path is drawn for each micro-batch, like dropout.
    plain = {"training__steps": 6, "downstream__drop_path": 0.0, "batch__micro_size": 8}
    assert finetune_here(flags(image_dataset, tmp_path / "one", **plain)) == 0
    split = {**plain, "batch__micro_size": 2, **layout}
    assert two_ranks(finetune_here, flags(image_dataset, tmp_path / "two", **split)) == [0, 0]
    one, two = (lines(seed_directory(tmp_path / name)) for name in ("one", "two"))
    assert len(one) == 6
    for line, other in zip(one, two, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), line["step"]
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), line["step"]
    mine, theirs = (read_full_state(checkpoint_path(seed_directory(tmp_path / name), 6)) for name in ("one", "two"))
    for name, tensor in mine.items():
        torch.testing.assert_close(
            theirs[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.exhaustive
def test_kill_9_at_a_random_step_and_go_on(image_dataset: Path, tmp_path: Path) -> None:
    """With drop path, and with images from a worker process."""
    changes = {"training__steps": 60, "checkpoint__every": 2, "data__workers": 1, "downstream__drop_path": 0.2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finetune_here(flags(image_dataset, whole, **{**changes, "data__workers": 0})) == 0
    command = flags(image_dataset, killed, **changes)
    finetune_until_killed(command, seed_directory(killed), 60)
    assert finetune_here(command) == 0
    runs = [[essence(line) for line in lines(seed_directory(run_dir))] for run_dir in (whole, killed)]
    assert runs[0] == runs[1] and len(runs[0]) == 60
    found = [result(run_dir) for run_dir in (whole, killed)]
    assert [each.pop("settings")["data"]["workers"] for each in found] == [0, 1]
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_kill_9_and_a_restart_in_its_place(image_dataset: Path, tmp_path: Path) -> None:
    changes = {"training__steps": 60, "checkpoint__every": 2, "data__workers": 0, "downstream__drop_path": 0.2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finetune_here(flags(image_dataset, whole, **changes)) == 0
    process = start([*flags(image_dataset, killed, **changes), "--reliability.restarts", "1"], script="finetune.py")
    wait_for_steps(process, seed_directory(killed), 7)
    (forked,) = descendants(process.pid)
    os.kill(forked, signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    runs = [[essence(line) for line in lines(seed_directory(run_dir))] for run_dir in (whole, killed)]
    assert runs[0] == runs[1] and len(runs[0]) == 60
