"""stop.json: why a run ended, and whether the same command should simply be started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.errors import RefusedError
from trp_scale.exit_status import ExitStatus
from trp_scale.training.ending import STOP_RECORD, Ending


def ending(run_dir: Path, rank: int = 0) -> Ending:
    found = Ending(run_dir=run_dir, rank=rank)
    found.begin()
    return found


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / STOP_RECORD).read_text())
    return found


@pytest.mark.parametrize(
    ("why", "status", "again"),
    [
        ("finished", 0, False),
        ("SIGTERM (rank 3)", 0, True),
        ("its launcher, process 12, is gone", 0, True),
        ("--training.max_hours 1 are over", 0, True),
        ("Ctrl-C", 0, False),
        ("the file /runs/a/STOP", 0, False),
        ("11 steps skipped, --training.max_skipped_steps allows 10", 3, False),
    ],
)
def test_an_agreed_end(tmp_path: Path, why: str, status: int, again: bool) -> None:
    ending(tmp_path).note_stop(why, 12, ExitStatus(status))
    found = record(tmp_path)
    assert (found["why"], found["step"], found["status"], found["again"]) == (why, 12, status, again)
    assert found["advice"]


@pytest.mark.parametrize("got_on", [True, False])
def test_what_broke_is_started_again_if_it_had_got_on(tmp_path: Path, got_on: bool) -> None:
    checkpoint_path(tmp_path, 4).mkdir(parents=True)
    found = ending(tmp_path, rank=1)
    if got_on:
        checkpoint_path(tmp_path, 8).mkdir()
    found.broke(OSError("the disk is gone"))
    assert record(tmp_path) | {"again": got_on, "status": 1, "rank": 1} == record(tmp_path)
    assert "OSError: the disk is gone" in record(tmp_path)["why"]


def test_what_is_refused_is_not(tmp_path: Path) -> None:
    found = ending(tmp_path)
    checkpoint_path(tmp_path, 8).mkdir(parents=True)
    found.broke(RefusedError("--optimizer.lr: ..."))
    assert (record(tmp_path)["status"], record(tmp_path)["again"]) == (2, False)


def test_the_first_ranks_record_stays_until_the_next_start(tmp_path: Path) -> None:
    first, second = ending(tmp_path, 1), ending(tmp_path, 0)
    first.hung(7, "rank 0 did not answer")
    second.broke(RuntimeError("connection closed by peer"))
    assert record(tmp_path)["status"] == 4
    ending(tmp_path)
    assert not (tmp_path / STOP_RECORD).exists()


def test_a_disk_without_room_hides_no_error(tmp_path: Path) -> None:
    found = ending(tmp_path)
    found.run_dir = tmp_path / "gone"
    found.broke(OSError("no space"))
