"""Processes that make shards from portions of the input, with a progress bar.

Each process makes one worker with `make(*arguments, advance)` and calls it with one portion after another. The
processes run on this machine or on a Ray cluster (clusters.py).

A damaged file can crash the process that decodes it. If one of several local processes is lost, its portion is retried
in a separate process, and samples that crash it again (named by `start_sample`) are skipped. With --processes 1 the
command itself does the work.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trp_scale.config.registry import load_module, own_modules
from trp_scale.console import Outlet
from trp_scale.errors import DataError

log = logging.getLogger(__name__)


ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Portion(Generic[ItemT]):
    """Inputs of one shard; `size` for the progress bar."""

    number: int
    items: Sequence[ItemT]
    size: int


PortionT = TypeVar("PortionT", bound=Portion[Any])
ReportT = TypeVar("ReportT")


Advance = Callable[..., None]
"""Called in a worker with the increments of the counters."""


@dataclass(frozen=True, kw_only=True)
class ProgressBar:
    """Content of the progress bar.

    Attributes:
        counters: names of the counters shared by the workers; the last one fills the bar.
        total: final value of the last counter.
        shown: whether the bar is shown.
        title: name of the work.
    """

    counters: tuple[str, ...]
    total: int
    shown: bool
    title: str = "sharding"

    @contextmanager
    def follow(self, values: Any) -> Iterator[None]:
        """Context in which a thread shows the shared counters and their rates since the start."""
        columns = (
            TextColumn(self.title),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        outlet: Any = Outlet(sys.stdout, "the work goes on")
        progress = Progress(*columns, console=Console(file=outlet), disable=not self.shown)
        task = progress.add_task("", total=max(1, self.total), rate="")
        ended, start = threading.Event(), time.monotonic()

        def update() -> None:
            counts, seconds = list[int](values[:]), max(1e-9, time.monotonic() - start)
            rates = (
                f"{count / seconds / 1e6:,.1f} MB/s"
                if name == "bytes"
                else f"{count:,} {name}  {count / seconds:,.0f}/s"
                for name, count in zip(self.counters, counts, strict=True)
            )
            progress.update(task, completed=counts[-1], rate="  ".join(rates))

        def repeat() -> None:
            while not ended.wait(0.25):
                update()

        thread = threading.Thread(target=repeat, daemon=True)
        with progress:
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
                update()


MAX_NAME_BYTES = 512
"""Maximum bytes of the name of the current sample."""

MAX_CRASHES = 100
"""Maximum samples of one portion that may crash a process."""

_worker: Callable[[Any], Any] | None = None
_number = 0
_slots: _Slots | None = None
_lethal: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Slots:
    """Current sample of each worker process, in shared memory.

    Attributes:
        portions: number of the current portion + 1, or 0.
        names: names of the current samples, MAX_NAME_BYTES bytes each.
    """

    portions: Any
    names: Any

    @classmethod
    def allocate(cls, context: Any, processes: int) -> _Slots:
        return cls(context.RawArray("q", processes), context.RawArray("c", MAX_NAME_BYTES * processes))

    def write(self, number: int, name: str) -> None:
        self.names[number * MAX_NAME_BYTES : (number + 1) * MAX_NAME_BYTES] = _truncate(name).ljust(
            MAX_NAME_BYTES, b"\0"
        )

    def read(self, number: int) -> str:
        written: bytes = self.names[number * MAX_NAME_BYTES : (number + 1) * MAX_NAME_BYTES]
        return written.rstrip(b"\0").decode("utf-8", "replace")


def _truncate(name: str) -> bytes:
    return name.encode("utf-8", "replace")[:MAX_NAME_BYTES]


def start_sample(name: str) -> bool:
    """Record the sample that this process starts, by a unique name. Return False if the sample crashed a process and
    must be skipped."""
    if _slots is not None:
        _slots.write(_number, name)
    return not _lethal or _truncate(name).decode("utf-8", "replace") not in _lethal


def process_number() -> int:
    """Return the index of this worker process on its machine; 0 under Ray."""
    return _number


def _start(
    make: Callable[..., Callable[[Any], Any]],
    arguments: tuple[Any, ...],
    counters: Any,
    started: Any,
    modules: list[str],
    slot: _Slots,
    lethal: frozenset[str],
) -> None:
    """Set up a worker process. It exits with its parent, so that no process writes after the command was killed."""
    global _worker, _number, _slots, _lethal
    _slots, _lethal = slot, lethal
    with started.get_lock():
        _number = started.value
        started.value += 1
    for module in modules:
        load_module(module)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = make(*arguments, _advance(counters))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _advance(counters: Any) -> Advance:
    def advance(*steps: int) -> None:
        with counters.get_lock():
            for number, step in enumerate(steps):
                counters[number] += step

    return advance


def _work(portion: Any) -> Any:
    assert _worker is not None and _slots is not None
    _slots.portions[_number] = portion.number + 1
    done = _worker(portion)
    _slots.portions[_number] = 0
    return done


def run_portions(
    portions: Sequence[PortionT],
    make: Callable[..., Callable[[PortionT], ReportT]],
    arguments: tuple[Any, ...],
    *,
    processes: int,
    bar: ProgressBar,
    executor: str = "local",
    gpus: int = 0,
) -> dict[int, ReportT]:
    """Make the shards of `portions` and return their reports by number.

    Args:
        make: called in each process as make(*arguments, advance); the result is called with each portion.
        processes: 0 = one per core.
        executor: "local" or "ray".
        gpus: per process, under Ray.

    Raises:
        DataError: a process died (killed, or out of memory) and died again in the retry.
    """
    if executor == "slurm-array":
        raise DataError("--executor slurm-array: only available on the command line; from Python, use local or ray")
    if not portions:
        return {}
    context = multiprocessing.get_context("spawn")  # forked copies of running threads can hang
    counters = context.Array("q", len(bar.counters))
    with bar.follow(counters):
        if executor == "ray":
            from trp_scale.sharding.clusters import run_on_ray

            advance = _advance(counters)
            return run_on_ray(portions, make, arguments, processes=processes, gpus=gpus, bar=bar, advance=advance)
        processes = min(processes or len(os.sched_getaffinity(0)), len(portions))
        if processes == 1:
            worker = make(*arguments, _advance(counters))
            return {portion.number: worker(portion) for portion in portions}
        return _run_processes(portions, (make, arguments, counters), context, processes, bar.title)


def _run_processes(
    portions: Sequence[Any], initial: tuple[Any, ...], context: Any, processes: int, title: str
) -> dict[int, Any]:
    """Make portions in several local processes; retry the portions of a lost process."""
    reports: dict[int, Any] = {}
    while left := [portion for portion in portions if portion.number not in reports]:
        slot = _Slots.allocate(context, processes)
        if _run(left, initial, context, processes, slot, frozenset(), reports):
            break
        lost = {number - 1 for number in slot.portions if number} - reports.keys()
        if not lost:  # no portion had started
            raise process_died(title)
        log.warning("a %s process was lost; its portion is made again in a separate process", title)
        for portion in left:
            if portion.number in lost:
                _retry_portion(portion, initial, context, reports, title)
    return {portion.number: reports[portion.number] for portion in portions}


def _retry_portion(portion: Any, initial: tuple[Any, ...], context: Any, reports: dict[int, Any], title: str) -> None:
    """Make one portion without the samples that crash its process."""
    lethal: frozenset[str] = frozenset()
    while True:
        slot = _Slots.allocate(context, 1)
        if _run([portion], initial, context, 1, slot, lethal, reports):
            return
        name = slot.read(0)
        if not name or name in lethal or len(lethal) == MAX_CRASHES:
            raise process_died(title)
        log.warning("%s is skipped: it crashes the process that reads it", name)
        lethal |= {name}


def _run(
    portions: Sequence[Any],
    initial: tuple[Any, ...],
    context: Any,
    processes: int,
    slot: _Slots,
    lethal: frozenset[str],
    reports: dict[int, Any],
) -> bool:
    """Make portions and add their reports; return False if a process was lost first."""
    arguments = (*initial, context.Value("i", 0), own_modules(), slot, lethal)
    other_processes = multiprocessing.active_children()
    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=arguments) as pool:
        with _ignore_interrupts():
            futures = {portion.number: pool.submit(_work, portion) for portion in portions}
        ended = whole = False
        try:
            while wait(futures.values(), timeout=0.5, return_when="FIRST_EXCEPTION").not_done:
                if any(future.done() and future.exception() for future in futures.values()):
                    break
            for number, future in futures.items():
                if future.done() and not isinstance(future.exception(), BrokenProcessPool):
                    reports[number] = future.result()
            ended = all(future.done() for future in futures.values())  # also true for a broken pool
            whole = ended and all(future.exception() is None for future in futures.values())
            return whole
        except BaseException:  # the other processes ignore Ctrl-C: kill them
            for process in multiprocessing.active_children():
                if process not in other_processes:
                    process.kill()
            ended = True  # after the pool has noticed
            raise
        finally:
            if not whole:
                _close_queue(pool)
            # Wait: a process that has just started still reads its arguments.
            pool.shutdown(wait=ended, cancel_futures=True)


def _close_queue(pool: ProcessPoolExecutor) -> None:
    """Close the queue of a pool without processes, so that its thread stops waiting for readers. Python before 3.11.7
    waits forever if the queue exceeds a pipe buffer (cpython#94777). A pool that ends within 2 s closes the queue
    itself; two concurrent closes would raise an error."""
    manager: Any = getattr(pool, "_executor_manager_thread", None)
    queue: Any = getattr(pool, "_call_queue", None)
    if manager is None or queue is None:
        return
    manager.join(timeout=2.0)
    if manager.is_alive():
        queue._reader.close()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Make processes started in this context ignore Ctrl-C, which a terminal sends to all. This process handles it and
    kills them, without their tracebacks."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def process_died(title: str) -> DataError:
    """Return the error of a lost process."""
    return DataError(
        f"a {title} process died (killed, or out of memory); run the same command again to resume, with fewer "
        "--processes if memory is short"
    )
