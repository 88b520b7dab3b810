"""Fetch micro-batches by position, in this process or in loader workers (torch's DataLoader)."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trp_scale.core.batch import Batch
from trp_scale.data.plan import Addresses, Blocks, Plan
from trp_scale.data.prefetch import Share, StoredTars, TarsAhead, tars_ahead
from trp_scale.distributed.stop import STOP_SIGNALS
from trp_scale.errors import RefusedError, UnreadableError
from trp_scale.storage.cache import use_of_caches

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval at which the loader checks its workers while it waits for a batch."""

STOP_WAIT_SECONDS = 5.0
"""Seconds that a run waits for rows after a stop request."""

TRIAL_SECONDS = 60.0
"""Time limit for rows that are read in a trial process."""

FEEDER_SECONDS = 1.0
"""Time limit for the end of a queue's feeder thread."""


class BatchBuilder(Protocol):
    """Builds a batch from the addresses of its rows; independent of order, cursors and workers.

    Attributes:
        limit: maximum number of masked positions of a row.
    """

    limit: int = 0

    def build(self, addresses: Addresses, start: int) -> Batch:
        """Build the batch of rows at `addresses`; the first is at position `start` of the source."""


class Fetcher(Dataset[Batch]):
    """Map-style data set behind DataLoader: maps a range of positions to a batch. Opens files lazily.

    Args:
        plan: order of the rows.
        builder: builds batches.
        stored: data sets of the order's members; tars under URLs are prefetched.
        share: positions that this machine reads; `None` for all.
    """

    def __init__(
        self, plan: Plan, builder: BatchBuilder, stored: Sequence[StoredTars] = (), share: Share | None = None
    ) -> None:
        self._plan, self._builder, self._stored, self._share = plan, builder, stored, share
        self._ahead: TarsAhead | None = None
        self._prefetch_started = False
        self._without: frozenset[int] = frozenset()

    def skip_positions(self, positions: Iterable[int]) -> None:
        """Treat the rows at these positions as unreadable."""
        self._without |= frozenset(positions)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ahead": None, "_prefetch_started": False}

    @property
    def module(self) -> str:
        """Module that defines the builder."""
        return type(self._builder).__module__

    def __getitems__(self, positions: range) -> Batch:
        """Build one micro-batch; DataLoader calls this for each range of the batch sampler."""
        if not self._prefetch_started:
            self._ahead, self._prefetch_started = tars_ahead(self._plan, self._stored, self._share), True
        if self._ahead is not None:
            self._ahead.reading(positions.start)
        addresses = self._plan.locate(np.arange(positions.start, positions.stop, dtype=np.int64))
        lethal = [row for row, at in enumerate(positions) if at in self._without]
        addresses.present[lethal] = False
        batch = self._builder.build(addresses, positions.start)
        for row in lethal:
            name = self._name(addresses, row)
            batch.corrupt = [*batch.corrupt, name]
            batch.reasons = {**batch.reasons, name: "reading it ends the process"}
        use = use_of_caches()
        batch.cache_use = () if use is None else tuple(use)
        return batch

    def _name(self, addresses: Addresses, row: int) -> str:
        """Name of a skipped row, for messages."""
        member, block = int(addresses.member[row]), int(addresses.block[row])
        dataset = self._stored[member] if member < len(self._stored) else None
        blocks: Blocks | None = getattr(dataset, "blocks", None)
        where = f"block {block} of data set {member}" if blocks is None else blocks.keys[block]
        return f"{where}, row {int(addresses.row[row])}"

    def close(self) -> None:
        """Stop prefetching tars in this process."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._prefetch_started = None, False


class WorkerLostError(RuntimeError):
    """A loader worker ended or hangs."""


class StoppedWaitingError(RuntimeError):
    """No micro-batch arrived after a stop request; the caller may try again."""


class _Ranges:
    """Sampler of torch's persistent loader: ranges of the current pass. A new iteration starts with those that were not
    delivered, as torch requests ranges ahead."""

    def __init__(self) -> None:
        self._rest: Iterator[range] = iter(())
        self.pending: deque[range] = deque()

    def begin(self, sampler: Iterable[range]) -> None:
        """Start a pass."""
        self._rest, self.pending = iter(sampler), deque()

    def __iter__(self) -> Iterator[range]:
        yield from tuple(self.pending)
        for range_ in self._rest:
            self.pending.append(range_)
            yield range_


class MicroBatches:
    """Batches of the ranges that `sampler` yields, in order.

    Workers are forked from a server process: forking a process that runs threads of torch, gloo and CUDA can deadlock
    in the child. The server imports torch once, so that a worker starts in milliseconds. As with every start method
    except fork, a worker imports the main script again; the script must guard its calls.
    Workers start with the first batch and stay for the next iteration over the sampler.

    A batch depends on its range only. If a worker ends or hangs for `stuck_seconds`, all workers are killed, and new
    ones make the batches that were not delivered. If the new ones end too, each range is read in a trial process, and
    rows that end it are skipped as unreadable.

    Args:
        fetcher: builds a batch from a range.
        sampler: ranges of a pass.
        workers: processes; 0 reads in this process.
        prefetch: micro-batches that each worker prepares ahead.
        pin_memory: pin batches for copies to a GPU.
        stuck_seconds: seconds without a batch after which workers count as hanging.
        stop_requested: returns whether the run was asked to stop; it then does not wait for a late batch.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        sampler: Iterable[range],
        *,
        workers: int,
        prefetch: int,
        pin_memory: bool,
        stuck_seconds: float = 300.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        if workers:
            start_worker_server(fetcher.module)
        self._fetcher, self._sampler = fetcher, sampler
        self._count, self._prefetch, self._pin_memory = workers, prefetch, pin_memory
        self._stuck_seconds, self._stop_requested = stuck_seconds, stop_requested
        self._ranges = _Ranges()
        self._loader: DataLoader[Batch] | None = None
        self._closed = False
        self._workers: list[BaseProcess] = []
        # A process that ends without close(), such as by an error before training, sends the workers SIGTERM, which
        # they ignore, and would wait for them for ever.
        self._kill_workers = Finalize(self, _kill, args=(self._workers,), exitpriority=0)
        self._feeders: list[threading.Thread] = []
        self._since: float | None = None
        self._stuck: list[int | None] = []
        self._watched = threading.Event()
        if workers:
            threading.Thread(target=self._watch, name="trp_scale workers", daemon=True).start()

    def __iter__(self) -> Iterator[Batch]:
        assert not self._closed, "closed"
        ranges = self._ranges
        ranges.begin(self._sampler)
        lost_at: range | None = None
        while True:
            try:
                yield from self._deliver()
                return
            except WorkerLostError as error:
                at = ranges.pending[0]
                if lost_at is None and not _survives(os.getpid):
                    raise RefusedError(
                        "loader workers end when they import the main script (see their errors above); put its calls "
                        'under if __name__ == "__main__":, or set --data.workers 0'
                    ) from error
                lost = self._find_lethal() if at == lost_at else []
                if at == lost_at and not lost:
                    raise UnreadableError(
                        f"{error}, again at the same rows, but none of the rows ends a process; check for a lack of "
                        "memory (dmesg), or set fewer --data.workers"
                    ) from error
                logger.warning("%s; new workers continue at the same rows", error)
                lost_at = None if lost else at
                self._drop_workers()

    def _deliver(self) -> Iterator[Batch]:
        if self._loader is None:
            self._loader = self._new_loader()
        before, threads = multiprocessing.active_children(), threading.enumerate()
        batches = iter(self._loader)
        self._workers += [child for child in multiprocessing.active_children() if child not in before]
        feeders = (thread for thread in threading.enumerate() if thread.name == "QueueFeederThread")
        self._feeders += [thread for thread in feeders if thread not in threads]
        while (item := self._await_batch(batches)) is not None:
            self._ranges.pending.popleft()
            yield item if item.wire is None else item.unpack()

    def _new_loader(self) -> DataLoader[Batch]:
        workers = self._count
        return DataLoader(
            self._fetcher,
            batch_sampler=self._ranges,  # type: ignore[arg-type]  # ranges stand for lists of positions
            num_workers=workers,
            prefetch_factor=self._prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=self._pin_memory,
            collate_fn=Batch.pack if workers else lambda batch: batch,  # type: ignore[arg-type]  # not of lists
            worker_init_fn=prepare_worker if workers else None,
            multiprocessing_context=multiprocessing.get_context("forkserver") if workers else None,
            generator=torch.Generator(),  # the default would advance the global generator
            timeout=POLL_SECONDS if workers else 0,
        )

    def _await_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch; `None` at the end.

        Raises:
            WorkerLostError: a worker ended or hangs.
            StoppedWaitingError: the batch is late and the run was asked to stop.
        """
        self._since = began = time.monotonic()
        try:
            while True:
                try:
                    return next(batches, None)
                except Exception as error:  # a message from a worker may be truncated
                    waited = time.monotonic() - began
                    if self._stop_requested() and waited > STOP_WAIT_SECONDS:
                        raise StoppedWaitingError(f"asked to stop, and no rows arrived for {waited:.0f} s") from error
                    if self._stuck:
                        raise WorkerLostError(
                            f"loader worker {', '.join(map(str, self._stuck))}: no batch for {waited:.0f} s "
                            "(--reliability.worker_seconds)"
                        ) from error
                    if ended := self._worker_ended(error):
                        raise WorkerLostError(
                            f"loader worker {', '.join(map(str, ended))} ended unexpectedly"
                        ) from error
                    if not _timed_out(error):
                        raise
        finally:
            self._since = None

    def _worker_ended(self, error: Exception) -> list[int | None]:
        """Process ids of dead workers. A worker's last message may arrive a moment before the worker is dead."""
        until = time.monotonic() + (0.0 if _timed_out(error) or isinstance(error, RuntimeError) else 1.0)
        while True:
            ended = [worker.pid for worker in self._workers if not worker.is_alive()]
            if ended or time.monotonic() > until:
                return ended
            time.sleep(0.05)

    def _watch(self) -> None:
        """Kill a hanging worker from a separate thread: the main thread waits for it in C, without a timeout."""
        while not self._watched.wait(POLL_SECONDS):
            since = self._since
            if since is None:
                continue
            waited = time.monotonic() - since
            if waited > self._stuck_seconds or (waited > STOP_WAIT_SECONDS and self._stop_requested()):
                self._stuck = [worker.pid for worker in self._workers]
                for worker in self._workers:
                    worker.kill()
                self._since = None

    def _find_lethal(self) -> list[int]:
        """Find positions with rows that end a process, and let the fetcher skip them."""
        skipped = []
        for pending in tuple(self._ranges.pending):
            if _survives(_make, self._fetcher, pending):
                continue
            ends = [at for at in pending if not _survives(_make, self._fetcher, range(at, at + 1))]
            skipped += ends
            self._fetcher.skip_positions(ends)
        return skipped

    def _drop_workers(self) -> None:
        """Kill the workers and drop torch's loader."""
        _kill(self._workers)
        self._loader, self._stuck = None, []

    def close(self) -> None:
        """End the workers. Drop iterators first: torch ends the workers with the last iterator."""
        self._watched.set()
        self._loader, self._closed, had_workers = None, True, bool(self._workers)
        self._fetcher.close()
        self._kill_workers()
        for thread in self._feeders:  # they hold semaphores of the workers' queues for a moment longer
            thread.join(FEEDER_SECONDS)
        self._feeders = []
        if had_workers:
            # Reference cycles of the loader still hold semaphores. If the process then ends by os._exit, the standard
            # library's resource tracker warns about them on the terminal (seen in one small run of three).
            gc.collect()


def _survives(action: Callable[..., object], *arguments: Any) -> bool:
    """Whether a process of the worker server survives an action; Python exceptions do not count."""
    process = multiprocessing.get_context("forkserver").Process(target=action, args=arguments, daemon=True)
    process.start()
    process.join(TRIAL_SECONDS)
    alive = process.is_alive()
    if alive:
        process.kill()
        process.join()
    return not alive and process.exitcode == 0


def _make(fetcher: Fetcher, positions: range) -> None:
    prepare_worker(0)
    with suppress(Exception):
        fetcher.__getitems__(positions)


def _timed_out(error: Exception) -> bool:
    """Whether DataLoader reports that no batch arrived within POLL_SECONDS."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")


def _kill(workers: list[BaseProcess]) -> None:
    """Kill live workers: they ignore the SIGTERM that torch sends."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    workers.clear()


def start_worker_server(module: str) -> None:
    """Start the process that workers are forked from, unless it runs; return before it is ready.

    It imports `module` (the batch builder's) once for all workers. It inherits a signal mask with STOP_SIGNALS blocked,
    and so does every worker: of a signal to the whole process group only the training process takes notice.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([module, __name__])
    multiprocessing.resource_tracker.ensure_running()  # if it started later, it would unblock the signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_worker(_: int) -> None:
    """Set up a worker: one thread, STOP_SIGNALS ignored, exit with the training process."""
    torch.set_num_threads(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit with the training process; torch watches the parent's process id, which is that of the server."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
