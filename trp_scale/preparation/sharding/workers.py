"""Portions of the input over processes, with a progress bar; one portion becomes one shard."""

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


def _start(
    make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...], counters: Any, modules: list[str]
) -> None:
    """Set up a process. It ends with its parent: one that was killed must not leave others writing."""
    global _worker
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
) -> dict[int, ReportT]:
    """Make the shards of `portions` and return their reports by number.

    Args:
        make: called once in each process as make(*arguments, advance); what it returns is called with each portion.
        processes: 0 = one for each core.

    Raises:
        DataError: a process died (killed, or out of memory).
    """
    processes = min(processes or os.cpu_count() or 1, len(portions))
    context = multiprocessing.get_context("spawn")  # forked copies of running threads can hang
    counters = context.Array("q", progressed.counters)
    with _Display(progressed, counters):
        if processes <= 1:
            if not portions:
                return {}
            worker = make(*arguments, _advance(counters))
            return {portion.number: worker(portion) for portion in portions}
        initial = (make, arguments, counters, own_modules())
        with ProcessPoolExecutor(processes, context, initializer=_start, initargs=initial) as pool:
            futures = {portion.number: pool.submit(_work, portion) for portion in portions}
            try:
                while wait(futures.values(), timeout=0.5, return_when="FIRST_EXCEPTION").not_done:
                    if any(future.done() and future.exception() for future in futures.values()):
                        break
                return {number: future.result() for number, future in futures.items()}
            except BrokenProcessPool as error:
                raise DataError(
                    f"a {progressed.title} process died (killed, or out of memory); run the same command again to go "
                    "on, with fewer --processes if memory is short"
                ) from error
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


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
