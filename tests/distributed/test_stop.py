"""A request to stop, heard by any one rank, ends all ranks after the same step with one whole checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.distributed.launched import launch, rank_of_two, wait_for_steps
from tests.grids import always
from tests.runs import flags, lines, pretrain_here
from trp_scale.checkpoint.run_directory import checkpoints, incompleteness
from trp_scale.distributed.stop import StopRequests
from trp_scale.training import pretrain

LONG = {"training__steps": 100_000, "logging__every": 1}


def one_whole_checkpoint_at_the_last_step(run_dir: Path) -> int:
    last = lines(run_dir)[-1]["step"]
    assert [step for step, _ in checkpoints(run_dir)] == [last]
    assert incompleteness(checkpoints(run_dir)[0][1]) is None
    assert not list((run_dir / "checkpoints").glob(".*")), "something half-written was left"
    return int(last)


# Every signal is heard alike (tests/unit/distributed/test_stop.py); a launcher takes ten seconds of both cores, and
# tests/faults/test_kills.py stops two ranks without one.
@pytest.mark.parametrize(
    ("launcher", "request_to_stop"),
    always([("torchrun", signal.SIGTERM), ("deepspeed", signal.SIGINT)]),
)
def test_a_signal_to_one_of_two_ranks(
    text_dataset: Path, tmp_path: Path, launcher: str, request_to_stop: signal.Signals
) -> None:
    extra = {"ds_config": "ds_configs/zero2.json"} if launcher == "deepspeed" else {}
    process = launch(launcher, flags(text_dataset, tmp_path, **LONG, **extra))
    wait_for_steps(process, tmp_path, 3)
    os.kill(rank_of_two(process, 1), request_to_stop)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    last = one_whole_checkpoint_at_the_last_step(tmp_path)
    assert 3 <= last < LONG["training__steps"]
    assert "(rank 1)" in (tmp_path / "summary.json").read_text(), "rank 0 had no signal"


def test_a_stop_file_and_max_hours(text_dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "STOP").touch()
    assert pretrain_here(flags(text_dataset, tmp_path / "file", **LONG)) == 0
    assert one_whole_checkpoint_at_the_last_step(tmp_path / "file") == 1
    assert not (tmp_path / "file" / "STOP").exists()
    hours = 1.0 / 3600
    assert pretrain_here(flags(text_dataset, tmp_path / "hours", training__max_hours=hours, **LONG)) == 0
    assert one_whole_checkpoint_at_the_last_step(tmp_path / "hours") >= 1


def test_a_request_in_the_last_step_stops_nothing(text_dataset: Path, tmp_path: Path) -> None:
    changes = {"training__steps": 1, "training__max_hours": 1e-9, "logging__every": 1}
    assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "finished"
    assert json.loads((tmp_path / "stop.json").read_text())["why"] == "finished"


def test_a_run_that_was_stopped_in_its_last_validation_is_finished_by_the_next_start(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"training__steps": 2, "validation__every": 2, "logging__every": 1}
    left: list[bool] = []  # validations
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "validate", lambda *arguments, **named: left.append(True))
        patch.setattr(StopRequests, "reason_to_stop", lambda self: "SIGTERM" if left else None)
        assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == 0
    first = json.loads((tmp_path / "summary.json").read_text())
    assert (first["steps"], first["exit_reason"].partition(" ")[0]) == (2, "SIGTERM")
    assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == 0
    second = json.loads((tmp_path / "summary.json").read_text())
    assert (second["steps"], second["exit_reason"]) == (2, "finished") and second["validation"]
    assert "(finished)" in (tmp_path / "report.txt").read_text()
