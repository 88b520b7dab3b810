"""Portions of the input over processes, with a progress bar; one portion becomes one shard.

A process makes its worker once, by `make(*arguments, advance)`, and calls it with one portion after another. The
processes are of this machine, or of a Ray cluster (on_ray.py).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trp_scale.config.components import load_module, own_modules
from trp_scale.data.index import DataError


class Numbered(Protocol):
    """A portion, as far as this file knows it."""

    @property
    def number(self) -> int: ...


PortionT = TypeVar("PortionT", bound=Numbered)
ReportT = TypeVar("ReportT")

Advance = Callable[..., None]
"""Called in a worker with what was done since the last call, one number for each counter."""


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """What the progress bar shows.

    Attributes:
        counters: numbers that workers count up together; the last one fills the bar.
        total: value of the last counter when all is done.
        text: (values of the counters, seconds since the start) -> text beside the bar.
        shown: whether there is a bar at all.
        title: of what is done.
    """

    counters: int
    total: int
    text: Callable[[Sequence[int], float], str]
    shown: bool
    title: str = "sharding"


_worker: Callable[[Any], Any] | None = None
_number = 0


def process_number() -> int:
    """Of this process among those of its machine that are at work, from 0; under Ray 0."""
    return _number


def _start(
    make: Callable[..., Callable[[Any], Any]],
    arguments: tuple[Any, ...],
    counters: Any,
    started: Any,
    modules: list[str],
) -> None:
    """Set up a process. It ends with its parent: one that was killed must not leave others writing."""
    global _worker, _number
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
            for place, step in enumerate(steps):
                counters[place] += step

    return advance


def _work(portion: Any) -> Any:
    assert _worker is not None
    return _worker(portion)


def run_portions(
    portions: Sequence[PortionT],
    make: Callable[..., Callable[[PortionT], ReportT]],
    arguments: tuple[Any, ...],
    *,
    processes: int,
    progressed: Progressed,
    executor: str = "local",
    gpus: int = 0,
) -> dict[int, ReportT]:
    """Make the shards of `portions` and return their reports by number.

    Args:
        make: called in each process as make(*arguments, advance); what it returns is called with each portion.
        processes: 0 = one for each core.
        executor: "local" or "ray".
        gpus: that Ray gives a process.

    Raises:
        DataError: a process died (killed, or out of memory).
    """
    if executor == "slurm-array":
        raise DataError("--executor slurm-array: goes with commands, which are submitted; from Python, local or ray")
    if not portions:
        return {}
    context = multiprocessing.get_context("spawn")  # forked copies of running threads can hang
    counters = context.Array("q", progressed.counters)
    with _Display(progressed, counters):
        if executor == "ray":
            from trp_scale.preparation.sharding.on_ray import run_on_ray

            return run_on_ray(
                portions,
                make,
                arguments,
                processes=processes,
                counters=progressed.counters,
                gpus=gpus,
                advance=_advance(counters),
                title=progressed.title,
            )
        processes = min(processes or len(os.sched_getaffinity(0)), len(portions))
        if processes == 1:
            worker = make(*arguments, _advance(counters))
            return {portion.number: worker(portion) for portion in portions}
        initial = (make, arguments, counters, context.Value("i", 0), own_modules())
        with ProcessPoolExecutor(processes, context, initializer=_start, initargs=initial) as pool:
            futures = {portion.number: pool.submit(_work, portion) for portion in portions}
            reports = None
            try:
                while wait(futures.values(), timeout=0.5, return_when="FIRST_EXCEPTION").not_done:
                    if any(future.done() and future.exception() for future in futures.values()):
                        break
                reports = {number: future.result() for number, future in futures.items()}
                return reports
            except BrokenProcessPool as error:
                raise process_died(progressed.title) from error
            finally:
                # A process that has only just been started when all is done would miss what it is started with.
                pool.shutdown(wait=reports is not None, cancel_futures=True)


def process_died(title: str) -> DataError:
    """The refusal to go on without it."""
    return DataError(
        f"a {title} process died (killed, or out of memory); run the same command again to go on, with fewer "
        "--processes if memory is short"
    )


class _Display:
    """The progress bar: a thread that reads the shared counters."""

    def __init__(self, progressed: Progressed, counters: Any) -> None:
        columns = (
            TextColumn(progressed.title),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, disable=not progressed.shown)
        self._task = self._progress.add_task("", total=max(1, progressed.total), rate="")
        self._text = progressed.text
        self._counters = counters
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._progress.start()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._update()
        self._progress.stop()

    def _follow(self) -> None:
        while not self._ended.wait(0.25):
            self._update()

    def _update(self) -> None:
        values: list[int] = self._counters[:]
        text = self._text(values, max(1e-9, time.monotonic() - self._start))
        self._progress.update(self._task, completed=values[-1], rate=text)
