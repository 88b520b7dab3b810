"""Runs that end by themselves: the status of each, and what stop.json says of it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_server import directory, faulty_server
from tests.runs import flags, pretrain_here
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.cli import main as cli
from trp_scale.distributed.liveness import Lease
from trp_scale.errors import ExitStatus


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "stop.json").read_text())
    return found


def test_too_many_steps_that_are_not_finite_end_with_status_3(text_dataset: Path, tmp_path: Path) -> None:
    changes = {"optimizer__lr": 1e30, "optimizer__warmup_steps": 0, "training__max_skipped_steps": 2}
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=20, **changes)) == 3
    found = record(tmp_path)
    assert (found["status"], found["again"]) == (3, False)
    assert "--training.max_skipped_steps" in found["why"]
    assert [step for step, _ in checkpoints(tmp_path)] == [found["step"]]
    assert found["step"] < 20


def test_a_run_that_diverged_is_not_finished(text_dataset: Path, tmp_path: Path) -> None:
    """Fewer steps were skipped than are allowed. The same command afterwards, which makes no step, says the same."""
    changes = {"optimizer__lr": 1e30, "optimizer__warmup_steps": 0, "training__steps": 6}
    for _ in range(2):
        assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == ExitStatus.DIVERGED
        found = record(tmp_path)
        assert (found["status"], found["again"], found["step"]) == (3, False, 6)
        assert "5 of 6 steps" in found["why"] and "step 6" in found["why"]
        assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == found["why"]


def test_a_finished_run_keeps_its_record(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same command nothing but environment.json hears; one with fewer steps is refused."""
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=3)) == 0
    names = ("config.yaml", "metrics.jsonl", "summary.json", "report.txt")
    ended = (tmp_path / "stop.json").read_bytes()
    before = [(tmp_path / name).read_bytes() for name in names]
    assert cli.main(["pretrain", *flags(text_dataset, tmp_path, training__steps=2)]) == ExitStatus.REFUSED
    assert re.search(r"3 steps.*--training\.steps .*2.*--run_dir", capsys.readouterr().err)
    other = flags(text_dataset, tmp_path, training__steps=4, optimizer__lr=0.5)
    assert cli.main(["pretrain", *other]) == ExitStatus.REFUSED
    assert "optimizer.lr" in capsys.readouterr().err
    assert (tmp_path / "stop.json").read_bytes() == ended, "the run is still one that has finished"
    assert cli.main(["doctor", str(tmp_path)]) == 0
    capsys.readouterr()
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=3)) == 0
    assert "3 steps" in capsys.readouterr().out
    assert [(tmp_path / name).read_bytes() for name in names] == before
    (tmp_path / "summary.json").unlink()  # as where the start before was killed after its last step
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=3)) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


def test_two_runs_at_once_in_one_directory(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second command is refused with the first one's name, and changes nothing."""
    command = ["pretrain", *flags(text_dataset, tmp_path, training__steps=1)]
    with Lease(tmp_path, renewed_each=0.1):
        assert cli.main(command) == ExitStatus.REFUSED
        assert f"process {os.getpid()} on " in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["lease.json"]
    assert cli.main(command) == ExitStatus.DONE


def test_a_mistake_of_the_user_ends_with_status_2(text_dataset: Path, tmp_path: Path) -> None:
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=1)) == 0
    (tmp_path / "stop.json").unlink()  # as of a run that was killed
    changed = flags(text_dataset, tmp_path, training__steps=2, optimizer__lr=0.5)
    assert cli.main(["pretrain", *changed]) == 2
    found = record(tmp_path)
    assert (found["status"], found["again"]) == (2, False)
    assert "optimizer.lr" in found["why"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_network_that_is_down_ends_with_status_1_and_is_waited_for_by_the_next_starts(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("TRP_SCALE_REMOTE_SECONDS", "0.5")
    monkeypatch.setenv("TRP_SCALE_CACHE", str(tmp_path / "cache"))
    run_dir = tmp_path / "run"
    with faulty_server(directory(text_dataset.parent)) as (url, faults):
        arguments = ["pretrain", *flags(f"{url}/{text_dataset.name}", run_dir, data__workers=workers)]
        assert cli.main([*arguments, "--training.steps", "1"]) == ExitStatus.DONE
        for tar in (tmp_path / "cache").rglob("*.tar"):
            tar.unlink()
        faults.of[".tar"] = ["500"] * 10_000
        for _ in range(2):
            assert cli.main([*arguments, "--training.steps", "3"]) == ExitStatus.FAILED
            stop = record(run_dir)
            assert (stop["status"], stop["again"]) == (1, True)


def test_more_unreadable_blocks_than_allowed_end_with_status_1(text_dataset: Path, tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "run"
    shutil.copytree(text_dataset, data)
    for tar in sorted((data / "shards").glob("*.tar")):
        content = bytearray(tar.read_bytes())
        content[len(content) // 3 : 2 * len(content) // 3] = b"\xff" * (2 * len(content) // 3 - len(content) // 3)
        tar.write_bytes(content)
    assert cli.main(["pretrain", *flags(data, run_dir)]) == ExitStatus.FAILED
    assert record(run_dir)["status"] == 1
