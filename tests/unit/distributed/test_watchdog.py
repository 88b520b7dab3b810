"""A run that hangs ends, and says which rank is late."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import environment
from trp_scale.distributed import watchdog as module
from trp_scale.distributed.watchdog import Watchdog, summary
from trp_scale.exit_status import ExitStatus


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALL_WRITTEN", 0.5)
    monkeypatch.setattr(module, "SLOW_START", 1.0)


class Ended:
    """In place of leaving the process."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.words: list[tuple[int, str]] = []
        self.done = threading.Event()

    def end(self, status: int) -> None:
        self.statuses.append(status)
        self.done.set()

    def word(self, step: int, why: str) -> None:
        self.words.append((step, why))


def watched(directory: Path, ended: Ended, **settings: Any) -> Watchdog:
    return Watchdog(directory, end=ended.end, leave_word=ended.word, **settings)


def test_without_a_sign_of_life_it_writes_what_the_rank_does_and_ends(tmp_path: Path) -> None:
    ended = Ended()
    with watched(tmp_path / "now", ended, limit=0.3, world=2) as watchdog:
        watchdog.step(7)
        assert ended.done.wait(10)
    assert ended.statuses == [ExitStatus.HUNG]
    ((step, why),) = ended.words
    assert step == 7
    assert "rank 1 did not answer" in why
    assert "a step has not got on for" in why
    stacks = (tmp_path / "now" / "rank-00000.txt").read_text()
    assert "test_without_a_sign_of_life" in stacks, "the stack of the thread that hangs"
    assert json.loads((tmp_path / "now" / "rank-00000.json").read_text())["at"] == "a step"
    assert (tmp_path / "now" / "summary.txt").read_text().startswith("the run hangs: rank 1")


def test_signs_of_life_keep_it_quiet_and_nothing_is_written(tmp_path: Path) -> None:
    ended = Ended()
    with watched(tmp_path / "now", ended, limit=0.4) as watchdog:
        for step in range(1, 9):
            watchdog.step(step)
            watchdog.beat("a validation")
            time.sleep(0.1)
    assert ended.statuses == []
    assert not (tmp_path / "now").exists()


def test_0_is_never(tmp_path: Path) -> None:
    with watched(tmp_path / "now", Ended(), limit=0.0) as watchdog:
        assert not watchdog._thread.is_alive()


def test_slow_steps_have_a_longer_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 times their median; the first steps and what is no step three times the limit."""
    monkeypatch.setattr(module, "SLOW_START", 3.0)
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    watchdog = Watchdog(tmp_path, limit=60.0)
    assert watchdog.limit() == 180
    for step in range(1, 8):
        watchdog.step(step)
        now[0] += 10
    watchdog.step(8)
    assert watchdog.limit() == 200
    watchdog.beat("a checkpoint")
    assert watchdog.limit() == 600


def test_after_a_request_to_stop_a_step_must_end_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER_A_REQUEST", 0.3)
    ended, asked = Ended(), time.monotonic()
    with watched(tmp_path / "now", ended, limit=600.0, stop_asked=lambda: asked) as watchdog:
        watchdog.step(3)
        assert ended.done.wait(10)
    assert "asked to stop, and no step has ended within 0 s" in ended.words[0][1]


def of(step: int, **begun: int) -> dict[str, Any]:
    return {"host": "node1", "step": step, "at": "a step", "why": "slow", "begun": begun, "last": ""}


@pytest.mark.parametrize(
    ("written", "late"),
    [
        ({0: of(5), 2: of(5)}, "rank 1 did not answer"),
        ({0: of(5), 1: of(4), 2: of(5)}, "rank 1 is at step 4, others at 5"),
        (
            {0: of(5, world=9, other=1), 1: of(5, world=9, other=1), 2: of(5, world=8, other=1)},
            "rank 2 has begun 8 collectives of group world, others 9",
        ),
        ({rank: of(5, world=9) for rank in range(3)}, "no rank is behind another"),
    ],
)
def test_the_late_rank_is_named(written: dict[int, dict[str, Any]], late: str) -> None:
    assert late in summary(written, 3).splitlines()[0]


LOCKED = """
import sys, time, ctypes
from pathlib import Path
from trp_scale.distributed import watchdog
watchdog.ALL_WRITTEN = watchdog.SLOW_START = 1.0
with watchdog.Watchdog(Path(sys.argv[1]), limit=0.5) as dog:
    dog.step(1)
    time.sleep(0.3)
    ctypes.PyDLL(None).sleep(60)  # in C, with Python's lock held: no other thread runs
"""


def test_a_library_that_holds_pythons_lock_is_no_escape(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr, "faulthandler's timer"
    assert time.monotonic() - began < 40
