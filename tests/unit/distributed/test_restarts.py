"""A rank that its process forks anew after a fault: what is one, what is passed on, and what the process ends with."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trp_scale.distributed.launchers import RankInfo, discover
from trp_scale.distributed.restarts import run_with_restarts
from trp_scale.distributed.stop import StopRequests, early_signal, launcher_processes

Run = Callable[[int], int]


def outcome(run: Run, tmp_path: Path, restarts: int = 2) -> tuple[int, list[str]]:
    """The status, and the attempts that were made."""
    made = tmp_path / "made"

    def noted(attempt: int) -> int:
        with made.open("a") as file:
            file.write(f"{attempt} ")
        return run(attempt)

    status = run_with_restarts(noted, info=RankInfo(), restarts=restarts, imports=lambda: None)
    return status, made.read_text().split()


def killed(attempt: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def raises(attempt: int) -> int:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("run", "status", "attempts"),
    [
        (lambda attempt: int(attempt < 1), 0, 2),
        (lambda attempt: 4 if attempt < 2 else 0, 0, 3),
        (lambda attempt: 1, 1, 3),
        (lambda attempt: 2, 2, 1),
        (lambda attempt: 3, 3, 1),
        (lambda attempt: 5, 5, 1),
        (lambda attempt: 0, 0, 1),
        (killed, 128 + signal.SIGKILL, 3),
        (raises, 1, 3),
    ],
    ids=["broken once", "hung twice", "broken", "refused", "skipped", "storage", "well", "killed", "raises"],
)
def test_what_starts_again(
    tmp_path: Path, run: Run, status: int, attempts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(run, tmp_path) == (status, [str(number) for number in range(attempts)])
    assert re.findall(r"(\d) of 2 \(--reliability", capsys.readouterr().err) == list("12"[: attempts - 1])


def test_who_starts_again_knows_how_often_it_has(tmp_path: Path) -> None:
    assert discover(os.environ).attempt is None

    def run(attempt: int) -> int:
        return 1 if attempt < 2 else 10 + int(discover(os.environ).attempt == 2)

    assert outcome(run, tmp_path)[0] == 11


def test_the_hours_of_a_run_begin_once(tmp_path: Path) -> None:
    def run(attempt: int) -> int:
        if attempt == 0:
            time.sleep(0.4)
            return 1
        with StopRequests(max_hours=0.3 / 3600, began=discover(os.environ).began) as stop:
            return 10 + int(stop.reason_to_stop() is not None)

    assert outcome(run, tmp_path, restarts=1)[0] == 11


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
@pytest.mark.parametrize("fault", [False, True], ids=["it stops", "it breaks"])
def test_a_request_to_stop_is_passed_on_and_nothing_starts_after_it(
    tmp_path: Path, number: signal.Signals, fault: bool
) -> None:
    waits = tmp_path / "waits"

    def run(attempt: int) -> int:
        waits.touch()
        while early_signal() is None:
            time.sleep(0.01)
        return int(fault)

    def ask() -> None:
        while not waits.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    before = signal.getsignal(number)
    thread.start()
    assert outcome(run, tmp_path) == (int(fault), ["0"])
    thread.join()
    assert signal.getsignal(number) is before


def test_a_rank_sees_that_what_looks_after_it_is_gone(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def run(attempt: int) -> int:
        told.write_text(" ".join(map(str, launcher_processes("torchrun", forked=True))))
        return 0

    outcome(run, tmp_path)
    assert told.read_text().split() == [str(os.getpid()), str(os.getppid())]
