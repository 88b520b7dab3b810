"""Requests to stop: what is heard, and that the handlers are given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grids import always
from tests.ranks import free_port
from tests.runs import environment
from trp_scale.distributed import stop
from trp_scale.distributed.stop import STOP_SIGNALS, StopRequests, listen_early
from trp_scale.errors import ExitStatus


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield Clock()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_signal_is_a_request_and_no_more(clock: Clock, number: signal.Signals) -> None:
    with StopRequests(clock=clock) as requests:
        assert requests.reason_to_stop() is None
        os.kill(os.getpid(), number)
        assert requests.reason_to_stop() == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.reason_to_stop() == number.name  # the first reason is the one that is logged


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_is_inherited_as_ignored_stays_ignored(clock: Clock, number: signal.Signals) -> None:
    before = {other: signal.getsignal(other) for other in STOP_SIGNALS}
    signal.signal(number, signal.SIG_IGN)
    try:
        listen_early()
        with StopRequests(clock=clock) as requests:
            os.kill(os.getpid(), number)
            assert requests.reason_to_stop() is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)


def test_a_request_is_acknowledged_on_the_screen(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with StopRequests(clock=clock) as requests:
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.reason_to_stop() == "Ctrl-C", "the hint is no reason"
        assert capsys.readouterr().err.startswith("Ctrl-C: stopping after this step, with a checkpoint")
    with StopRequests(clock=clock, rank=1):
        os.kill(os.getpid(), signal.SIGTERM)
    assert capsys.readouterr().err == "", "one rank speaks"


def test_the_second_ctrl_c_is_immediate_unless_a_launcher_repeated_the_first(clock: Clock) -> None:
    with StopRequests(clock=clock) as requests:
        os.kill(os.getpid(), signal.SIGINT)
        clock.now += 0.2
        os.kill(os.getpid(), signal.SIGINT)
        reason = requests.reason_to_stop()
        assert reason is not None
        assert reason.startswith("Ctrl-C")
        clock.now += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_next_run_of_a_process_was_not_asked_to_stop(clock: Clock) -> None:
    with StopRequests(clock=clock):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.first_signal_time() is not None
    assert stop.first_signal_time() is None
    with StopRequests(clock=clock) as requests:
        assert requests.reason_to_stop() is None


def test_the_time_limit_counts_from_entry(clock: Clock) -> None:
    requests = StopRequests(max_hours=0.5, clock=clock)
    clock.now += 3600
    with requests:
        clock.now += 1799
        assert requests.reason_to_stop() is None
        clock.now += 1
        assert requests.reason_to_stop() == "--training.max_hours 0.5 reached"


def test_the_file_is_looked_for_once_a_second_and_taken_away(clock: Clock, tmp_path: Path) -> None:
    with StopRequests(tmp_path, clock=clock) as requests, StopRequests(tmp_path, rank=1, clock=clock) as of_rank_1:
        assert requests.reason_to_stop() is None
        (tmp_path / "STOP").touch()
        clock.now += 0.5
        assert requests.reason_to_stop() is None
        clock.now += 2.0
        assert of_rank_1.reason_to_stop() is None
        clock.now -= 2.0
        clock.now += 0.6
        assert requests.reason_to_stop() == f"the file {tmp_path / 'STOP'}"
    assert not (tmp_path / "STOP").exists()


def said_by(code: str, *signals: signal.Signals, apart: float = 0.0) -> tuple[int, str]:
    """Status and output of a process that gets these signals once it has printed "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for count, number in enumerate(signals):
        time.sleep(apart * bool(count))
        process.send_signal(number)
    output = process.communicate(timeout=240)[0]
    return process.returncode, output


EARLY = """
import sys, time
import trp_scale.cli.main as cli
from trp_scale.distributed.stop import (NOTICES, STOP_SIGNALS, StopRequests, early_signal, listen_early)

def imports(argv):
    print("ready", flush=True)
    while early_signal() is None:
        time.sleep(0.02)
    with StopRequests() as stop:
        print(stop.reason_to_stop())
    return 0

cli.main = imports
sys.argv = ["trp-scale", *{argv}]
cli.console()
"""


def test_a_request_that_comes_before_there_is_a_run_is_heard_by_it() -> None:
    assert said_by(EARLY.format(argv=["finetune", "--recipe", "x"]), signal.SIGTERM) == (0, "SIGTERM\n")
    assert said_by(EARLY.format(argv=["shard-text"]), signal.SIGTERM)[0] == -signal.SIGTERM, "as of any command"


AWAITS = """
from datetime import timedelta
from trp_scale.distributed.stop import listen_early
from trp_scale.distributed.environment import gather
from trp_scale.distributed.launchers import RankInfo

listen_early()
print("ready", flush=True)
gather(RankInfo(rank={rank}, world=2, master_port={port}), timeout=timedelta(minutes=5))
"""


@pytest.mark.parametrize("rank", always([0, 1], 1))
def test_a_request_ends_the_wait_for_other_ranks(rank: int) -> None:
    status, output = said_by(AWAITS.format(rank=rank, port=free_port()), signal.SIGTERM)
    assert (status, "SIGTERM during the rendezvous" in output) == (0, True)


DEAF = """
import ctypes
from trp_scale.distributed.stop import (NOTICES, STOP_SIGNALS, StopRequests, listen_early)

with StopRequests():
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    print("ready", flush=True)
    library.pthread_mutex_lock(lock)  # for ever, in C, where Python's handlers do not run
"""


def test_the_second_ctrl_c_ends_a_process_that_waits_where_no_handler_runs() -> None:
    assert said_by(DEAF, signal.SIGINT, signal.SIGINT, apart=1.2)[0] == ExitStatus.INTERRUPTED
