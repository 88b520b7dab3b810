"""Worker processes: deaf to the signals that stop a run, gone when their parent is, closed when asked."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.synchronize import SemLock
from pathlib import Path

import pytest

from tests.unit.data.stored import config_for, write_dataset
from trp_scale.data.fetch import start_worker_server
from trp_scale.data.sources import TrainSource
from trp_scale.distributed.stop import STOP_SIGNALS
from trp_scale.pretraining.base import open_sources

ROOT = Path(__file__).parents[3]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", block_rows=[[5, 7, 3, 9]])


@pytest.fixture
def train(dataset: Path) -> Iterator[TrainSource]:
    sources = open_sources(config_for(dataset, data={"workers": 2, "prefetch": 1}), rank=0, world=1)
    yield sources.train
    sources.close()


def gone(process: int, within: float) -> bool:
    """Whether a process ends in time (a process that has ended and waits for its parent counts as gone)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{process}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def start_workers(train: TrainSource) -> list[int]:
    """Read a window; returns the processes of the workers."""
    before = set(multiprocessing.active_children())
    train.next_window()
    return [child.pid for child in multiprocessing.active_children() if child not in before and child.pid is not None]


def test_signals_to_the_group_do_not_stop_the_workers(train: TrainSource) -> None:
    """As when a scheduler signals every process of a job: the loader must live until all ranks have agreed to stop."""
    workers = start_workers(train)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert len(workers) == 2
    for number in STOP_SIGNALS:
        for process in (*workers, server):
            os.kill(process, number)
    for _ in range(10):  # beyond what was fetched ahead
        assert len(train.next_window()) == 4
    assert train.cursor == 11 * 12


def test_the_caller_still_hears_its_signals(train: TrainSource) -> None:
    start_worker_server("trp_scale.pretraining.pos_bert.batch")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)
    train.next_window()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


def test_close_ends_the_workers(train: TrainSource) -> None:
    workers = start_workers(train)
    train.close()
    assert all(gone(process, within=60.0) for process in workers)


@pytest.mark.exhaustive
def test_close_ends_a_worker_that_does_not_answer(train: TrainSource) -> None:
    workers = start_workers(train)
    os.kill(workers[0], signal.SIGSTOP)
    train.close()
    assert gone(workers[0], within=60.0)


RUN = """
import multiprocessing, sys, time
from tests.unit.data.stored import config_for
from trp_scale.pretraining.base import open_sources

sources = open_sources(config_for(sys.argv[1], data={"workers": 2}), rank=0, world=1)
sources.train.next_window()
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
if sys.argv[2] == "fail":
    raise RuntimeError(f"a fault while {sources} is open")  # which the traceback keeps alive
time.sleep(600)
"""


def training_process(dataset: Path, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that has taken a window, and its two workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(dataset), then],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers


@pytest.mark.exhaustive
def test_workers_end_when_the_training_process_is_killed(dataset: Path) -> None:
    process, workers = training_process(dataset, "wait")
    process.kill()
    process.communicate()
    assert all(gone(worker, within=60.0) for worker in workers)


@pytest.mark.exhaustive  # as workers of a process that is killed end
def test_a_process_that_fails_does_not_wait_for_workers_that_nobody_has_closed(dataset: Path) -> None:
    process, workers = training_process(dataset, "fail")
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1 and "RuntimeError: a fault while" in said
    assert all(gone(worker, within=60.0) for worker in workers)


def semaphores() -> int:
    """Semaphores of this process that nobody has let go of."""
    return sum(isinstance(each, SemLock) for each in gc.get_objects())


def test_closing_lets_go_of_every_semaphore(dataset: Path) -> None:
    """A process that ends right after it would leave them behind, with a warning from the standard library."""
    gc.collect()
    before = semaphores()
    gc.disable()
    try:
        config = config_for(dataset, data={"workers": 1, "validation_fraction": 0.5}, validation={"every": 1})
        sources = open_sources(config, rank=0, world=1)
        sources.train.next_window()
        list(sources.validation.windows())
        assert semaphores() > before
        sources.close()
        assert semaphores() == before
    finally:
        gc.enable()
