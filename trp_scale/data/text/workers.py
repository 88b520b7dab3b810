"""Portions of a corpus over processes, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trp_scale.data.index import DataError
from trp_scale.data.text.annotate import Annotator
from trp_scale.data.text.corpus import Portion
from trp_scale.data.text.documents import ReadSettings
from trp_scale.data.text.portion import PortionReport, RowSettings, write_portion
from trp_scale.data.text.settings import ShardTextConfig
from trp_scale.data.text.taggers import make_tagger
from trp_scale.data.text.tokenizer import load_for_sharding


class PortionWorker:
    """What a process keeps between portions: its tokenizer, its tagger and what the annotator remembers."""

    def __init__(self, output: Path, tagger: str, read: ReadSettings, rows: RowSettings, counters: Any) -> None:
        # One thread: the cores are shared out between processes.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._output = output
        self._annotator = Annotator(load_for_sharding(output / "tokenizer"), make_tagger(tagger))
        self._read = read
        self._rows = rows
        self._counters = counters

    def __call__(self, portion: Portion) -> PortionReport:
        return write_portion(portion, self._output, self._annotator, self._read, self._rows, self._advance)

    def _advance(self, documents: int, words: int, size: int) -> None:
        with self._counters.get_lock():
            for index, step in enumerate((documents, words, size)):
                self._counters[index] += step


_worker: PortionWorker | None = None


def _start(*arguments: Any) -> None:
    """Set up a process. It ends with its parent: one that was killed must not leave others writing."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = PortionWorker(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(portion: Portion) -> PortionReport:
    assert _worker is not None
    return _worker(portion)


def run_portions(
    config: ShardTextConfig, portions: Sequence[Portion], tagger: str, read: ReadSettings, rows: RowSettings
) -> dict[int, PortionReport]:
    """Make the shards of `portions` and return their reports by number.

    Raises:
        DataError: a process died (killed, or out of memory).
    """
    processes = min(config.processes or os.cpu_count() or 1, len(portions))
    context = multiprocessing.get_context("spawn")  # forked copies of running tokenizer threads can hang
    counters = context.Array("q", 3)  # documents, words, bytes
    arguments = (config.output, tagger, read, rows, counters)
    with _Display(config.progress, sum(portion.size for portion in portions), counters):
        if processes <= 1:
            if not portions:
                return {}
            worker = PortionWorker(*arguments)
            return {portion.number: worker(portion) for portion in portions}
        with ProcessPoolExecutor(processes, context, initializer=_start, initargs=arguments) as pool:
            futures = {portion.number: pool.submit(_work, portion) for portion in portions}
            try:
                while wait(futures.values(), timeout=0.5, return_when="FIRST_EXCEPTION").not_done:
                    if any(future.done() and future.exception() for future in futures.values()):
                        break
                return {number: future.result() for number, future in futures.items()}
            except BrokenProcessPool as error:
                raise DataError(
                    "a sharding process died (killed, or out of memory); run the same command again to go on, "
                    "with fewer --processes if memory is short"
                ) from error
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


class _Display:
    """The progress bar: a thread that reads the shared counters."""

    def __init__(self, shown: bool, size: int, counters: Any) -> None:
        columns = (
            TextColumn("sharding"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, disable=not shown)
        self._task = self._progress.add_task("", total=max(1, size), rate="")
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
        documents, words, size = self._counters[:]
        rate = words / max(1e-9, time.monotonic() - self._start)
        text = f"{documents:,} documents  {words:,} words  {rate:,.0f} words/s"
        self._progress.update(self._task, completed=size, rate=text)
