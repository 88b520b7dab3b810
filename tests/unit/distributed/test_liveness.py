"""One run a directory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.grids import always
from tests.runs import environment
from trp_scale.distributed import liveness as module
from trp_scale.distributed.liveness import LEASE, Lease, Watchdog, lease_holder, summary
from trp_scale.errors import ExitStatus, RefusedError
from trp_scale.training.rundir import STOP_RECORD, Ending


def quick(run_dir: Path, **settings: Any) -> Lease:
    return Lease(run_dir, gone_after=1.0, renewed_each=0.1, **settings)


def test_a_second_start_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    with quick(tmp_path):
        assert lease_holder(tmp_path)["process"] == os.getpid()
        with pytest.raises(RefusedError, match=f"{os.getpid()}"), quick(tmp_path):
            pass
        assert lease_holder(tmp_path), "the first one has it still"
    assert not (tmp_path / LEASE).exists()
    with quick(tmp_path):
        assert not lease_holder(tmp_path)["gone"]


def test_it_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with quick(tmp_path), pytest.raises(RefusedError), quick(tmp_path):
        pass
    Ending(run_dir=tmp_path, rank=0).hung(3, "rank 1 did not answer")
    assert json.loads((tmp_path / STOP_RECORD).read_text())["step"] == 3


def test_a_removed_run_directory_ends_the_run(tmp_path: Path) -> None:
    run_dir, messages, ended = tmp_path / "run", list[str](), threading.Event()
    run_dir.mkdir()

    def end(message: str) -> None:
        messages.append(message)
        ended.set()

    with quick(run_dir, lost=end):
        shutil.rmtree(run_dir)
        assert ended.wait(60)
    assert str(run_dir) in messages[0]


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    entered = f"Lease(Path({str(tmp_path)!r})).__enter__()"
    code = f"import os; from trp_scale.distributed.liveness import *; {entered}; os._exit(9)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=False, timeout=240)
    assert lease_holder(tmp_path)["gone"]
    began = time.monotonic()
    with Lease(tmp_path):
        assert time.monotonic() - began < 30, "its host knows that it is gone: nobody waits for signs of life"
        assert lease_holder(tmp_path)["process"] == os.getpid()


def test_a_process_of_another_container_may_be_alive_though_it_is_not_seen(tmp_path: Path) -> None:
    """Two containers of a host may share its name."""
    with Lease(tmp_path):
        held = json.loads((tmp_path / LEASE).read_text())
    (tmp_path / LEASE).write_text(json.dumps({**held, "pid_namespace": "pid:[1]", "began": "another's"}))
    assert not lease_holder(tmp_path)["gone"]
    (tmp_path / LEASE).write_text(json.dumps({**held, "began": "another's"}))
    assert lease_holder(tmp_path)["gone"]


def of_another_host(run_dir: Path) -> None:
    (run_dir / LEASE).write_text(json.dumps({"token": "t", "host": "node7", "process": 12, "started": "today"}))


def test_another_hosts_lease_is_taken_over_when_it_is_not_renewed(tmp_path: Path) -> None:
    of_another_host(tmp_path)
    began = time.monotonic()
    with quick(tmp_path):
        assert time.monotonic() - began > 0.9
        assert lease_holder(tmp_path)["process"] == os.getpid()


def test_another_hosts_lease_that_is_renewed_is_refused(tmp_path: Path) -> None:
    of_another_host(tmp_path)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.1):
            os.utime(tmp_path / LEASE)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(RefusedError, match="process 12 on node7, started today"), quick(tmp_path):
            pass
    finally:
        done.set()
        thread.join()


def test_who_was_taken_over_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    with quick(tmp_path, lost=told.append):
        of_another_host(tmp_path)
        until = time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.05)
    assert "process 12 on node7 has taken over this directory" in told[0]
    assert lease_holder(tmp_path)["host"] == "node7", "and leaves the other one's lease"


def test_of_many_starts_at_once_one_gets_it(tmp_path: Path) -> None:
    """Also where each finds the lease of a process that is gone."""
    of_another_host(tmp_path)
    got: list[Lease] = []
    refused: list[str] = []

    def start() -> None:
        lease = quick(tmp_path)
        try:
            got.append(lease.__enter__())
        except RefusedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
    got[0].__exit__(None, None, None)


@pytest.mark.parametrize("content", always(["", "[" * 100_000, "[]", '{"token": 3}'], "[" * 100_000, '{"token": 3}'))
def test_a_damaged_lease_is_of_nobody_that_renews_it(tmp_path: Path, content: str) -> None:
    (tmp_path / LEASE).write_text(content)
    with quick(tmp_path):
        assert lease_holder(tmp_path)["process"] == os.getpid()


@pytest.fixture(autouse=True)
def quick_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORTS_TIMEOUT_S", 0.5)
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
    return Watchdog(directory, end=ended.end, on_hang=ended.word, **settings)


def test_without_a_sign_of_life_it_writes_what_the_rank_does_and_ends(tmp_path: Path) -> None:
    ended = Ended()
    with watched(tmp_path / "now", ended, limit=0.3, world=2) as watchdog:
        watchdog.step(7)
        assert ended.done.wait(60)
    assert ended.statuses == [ExitStatus.HUNG]
    ((step, why),) = ended.words
    assert step == 7
    assert "rank 1 did not report" in why
    assert "a step has made no progress for" in why
    stacks = (tmp_path / "now" / "rank-00000.txt").read_text()
    assert "test_without_a_sign_of_life" in stacks, "the stack of the thread that hangs"
    assert json.loads((tmp_path / "now" / "rank-00000.json").read_text())["at"] == "a step"
    assert (tmp_path / "now" / "summary.txt").read_text().startswith("the run hangs: rank 1")


def test_signs_of_life_keep_it_quiet_and_nothing_is_written(tmp_path: Path) -> None:
    ended = Ended()
    with watched(tmp_path / "now", ended, limit=1.5) as watchdog:
        for step in range(1, 9):
            watchdog.step(step)
            watchdog.beat("a validation")
            time.sleep(0.25)
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
    with watched(tmp_path / "now", ended, limit=600.0, stop_request_time=lambda: asked) as watchdog:
        watchdog.step(3)
        assert ended.done.wait(60)
    assert "no step has ended within 0 s" in ended.words[0][1]


def of(step: int, **begun: int) -> dict[str, Any]:
    return {"host": "node1", "step": step, "at": "a step", "why": "slow", "begun": begun, "last": ""}


@pytest.mark.parametrize(
    ("written", "late"),
    [
        ({0: of(5), 2: of(5)}, "rank 1 did not report"),
        ({0: of(5), 1: of(4), 2: of(5)}, "rank 1 is at step 4, others at 5"),
        (
            {0: of(5, world=9, other=1), 1: of(5, world=9, other=1), 2: of(5, world=8, other=1)},
            "rank 2 has started 8 collectives of group world, others 9",
        ),
        ({rank: of(5, world=9) for rank in range(3)}, "no rank is behind"),
    ],
)
def test_the_late_rank_is_named(written: dict[int, dict[str, Any]], late: str) -> None:
    assert late in summary(written, 3).splitlines()[0]


LOCKED = """
import sys, time, ctypes
from pathlib import Path
from trp_scale.distributed import liveness as watchdog
watchdog.REPORTS_TIMEOUT_S = watchdog.SLOW_START = 1.0
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
