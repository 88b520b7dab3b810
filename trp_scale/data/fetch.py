"""Fetching micro-batches by position, in this process or in workers: torch's DataLoader around a plan and a builder."""

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
from trp_scale.data.stores.prefetch import Share, StoredTars, TarsAhead, tars_ahead
from trp_scale.distributed.stop import STOP_SIGNALS
from trp_scale.errors import RefusedError, UnreadableError
from trp_scale.storage.cache import use_of_caches

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""A batch that does not come is asked for again after so long; between, it is seen whether workers live."""

PATIENCE_OF_A_STOP = 5.0
"""Seconds that a run which was asked to stop waits for its next rows."""

TRIAL_SECONDS = 60.0
"""That rows may take which are tried in a process of their own."""

FEEDER_SECONDS = 1.0
"""To wait at most for a thread that has been told to end."""


class BatchBuilder(Protocol):
    """Knows what a block holds and how rows become a Batch; knows nothing of order, cursors and workers."""

    def build(self, addresses: Addresses, start: int) -> Batch: ...


class Fetcher(Dataset[Batch]):
    """The map-style data set behind DataLoader: a range of positions in, a batch out. Opens files lazily.

    Args:
        plan: the order.
        builder: makes batches.
        stored: the data sets of the order's members, whose tars are fetched ahead if they lie under URLs.
        share: what this machine reads; None: everything.
    """

    def __init__(
        self, plan: Plan, builder: BatchBuilder, stored: Sequence[StoredTars] = (), share: Share | None = None
    ) -> None:
        self._plan, self._builder, self._stored, self._share = plan, builder, stored, share
        self._ahead: TarsAhead | None = None
        self._asked = False
        self._without: frozenset[int] = frozenset()

    def leave_out(self, positions: Iterable[int]) -> None:
        """Skip the rows at these positions in later batches, like unreadable rows."""
        self._without |= frozenset(positions)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ahead": None, "_asked": False}

    @property
    def module(self) -> str:
        """Module that defines the builder, which a worker has to import."""
        return type(self._builder).__module__

    def __getitem__(self, position: int) -> Batch:
        return self.__getitems__(range(position, position + 1))

    def __getitems__(self, positions: range) -> Batch:
        """One micro-batch; DataLoader calls this with what the batch sampler yields."""
        if not self._asked:
            self._ahead, self._asked = tars_ahead(self._plan, self._stored, self._share), True
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
        """Return the name of a skipped row, for messages."""
        member, block = int(addresses.member[row]), int(addresses.block[row])
        dataset = self._stored[member] if member < len(self._stored) else None
        blocks: Blocks | None = getattr(dataset, "blocks", None)
        where = f"block {block} of data set {member}" if blocks is None else blocks.keys[block]
        return f"{where}, row {int(addresses.row[row])}"

    def close(self) -> None:
        """Fetch no more tars ahead, in this process."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._asked = None, False


class WorkerLostError(RuntimeError):
    """A loader worker has ended, or has made nothing for too long."""


class StoppedWaitingError(RuntimeError):
    """The run was asked to stop while a micro-batch did not come; it can be asked for again."""


class _Ranges:
    """The ranges of one pass: torch asks for them ahead of time; those that were not delivered are asked for again."""

    def __init__(self, sampler: Iterable[range]) -> None:
        self._rest = iter(sampler)
        self.pending: deque[range] = deque()

    def __iter__(self) -> Iterator[range]:
        yield from tuple(self.pending)
        for range_ in self._rest:
            self.pending.append(range_)
            yield range_


class _PassSampler:
    """Sampler of torch's persistent loader: the ranges of the current pass."""

    def __init__(self) -> None:
        self.present: Iterable[range] = ()

    def __iter__(self) -> Iterator[range]:
        return iter(self.present)


class MicroBatches:
    """The batches of the ranges that `sampler` yields, in their order, from workers or from this process.

    Workers are forked from a server process, not from this one: forking a process that runs torch's, gloo's and CUDA's
    threads can deadlock in the child. The server has imported torch once, so a worker starts in milliseconds after it.
    (As with any start method but fork, a worker imports the main script again, which must guard what it runs.)
    Workers start with the first batch, and stay for the next iteration if the sampler is iterated again.

    A batch is a function of its range alone. So where a worker ends, or makes nothing for `stuck_seconds`, all are
    killed, and new ones make what was not delivered. Where that ends them again, each range is tried in a process of
    its own, and rows that end it are left out as unreadable.

    Args:
        fetcher: makes a batch of a range.
        sampler: the ranges of a pass.
        workers: processes; 0: this one.
        prefetch: micro-batches that each prepares ahead.
        pin_memory: for copies to a GPU.
        stuck_seconds: without a batch, after which the workers are taken to be stuck.
        asked: whether the run was asked to stop: then a batch that does not come is not awaited.
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
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        if workers:
            start_worker_server(fetcher.module)
        self._fetcher, self._sampler = fetcher, sampler
        self._count, self._prefetch, self._pin_memory = workers, prefetch, pin_memory
        self._stuck_seconds, self._asked = stuck_seconds, asked
        self._passes = _PassSampler()
        self._loader: DataLoader[Batch] | None = None
        self._closed = False
        self._workers: list[BaseProcess] = []
        # A process that ends without close(), say by an error before training, would send them SIGTERM, to which they
        # are deaf, and wait for them for ever.
        self._kill_workers = Finalize(self, _kill, args=(self._workers,), exitpriority=0)
        self._feeders: list[threading.Thread] = []
        self._since: float | None = None
        self._stuck: list[int | None] = []
        self._watched = threading.Event()
        if workers:
            threading.Thread(target=self._watch, name="trp_scale workers", daemon=True).start()

    def __iter__(self) -> Iterator[Batch]:
        assert not self._closed, "closed"
        ranges = _Ranges(self._sampler)
        lost_at: range | None = None
        while True:
            try:
                yield from self._deliver(ranges)
                return
            except WorkerLostError as error:
                at = ranges.pending[0]
                if lost_at is None and not _survives(multiprocessing.get_context("forkserver"), _do_nothing):
                    raise RefusedError(
                        "loader workers end when they import the main script (their errors are above); allowed: a "
                        'script whose calls are under if __name__ == "__main__":, or --data.workers 0'
                    ) from error
                lost = self._left_out(ranges) if at == lost_at else []
                if at == lost_at and not lost:
                    raise UnreadableError(
                        f"{error}, again at the same rows, none of which ends a process by itself; look for a lack of "
                        "memory (dmesg), or take fewer --data.workers"
                    ) from error
                logger.warning("%s; new ones go on at the same rows", error)
                lost_at = None if lost else at
                self._forget()

    def _deliver(self, ranges: _Ranges) -> Iterator[Batch]:
        if self._loader is None:
            self._loader = self._new_loader()
        self._passes.present = ranges
        before, threads = multiprocessing.active_children(), threading.enumerate()
        batches = iter(self._loader)
        self._workers += [child for child in multiprocessing.active_children() if child not in before]
        feeders = (thread for thread in threading.enumerate() if thread.name == "QueueFeederThread")
        self._feeders += [thread for thread in feeders if thread not in threads]
        while (item := self._await_batch(batches)) is not None:
            ranges.pending.popleft()
            yield item if item.wire is None else item.unpack()

    def _new_loader(self) -> DataLoader[Batch]:
        workers = self._count
        return DataLoader(
            self._fetcher,
            batch_sampler=self._passes,  # type: ignore[arg-type]  # ranges stand for lists of positions
            num_workers=workers,
            prefetch_factor=self._prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=self._pin_memory,
            collate_fn=Batch.pack if workers else _keep_batch,  # type: ignore[arg-type]  # not of lists
            worker_init_fn=prepare_worker if workers else None,
            multiprocessing_context=multiprocessing.get_context("forkserver") if workers else None,
            generator=torch.Generator(),  # the default would draw from, and so move, the global generator
            timeout=LOOK_SECONDS if workers else 0,
        )

    def _await_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch; None at the end.

        Raises:
            WorkerLostError: it will not come.
            StoppedWaitingError: the run was asked to stop, and it has not come.
        """
        self._since = began = time.monotonic()
        try:
            while True:
                try:
                    return next(batches, None)
                except Exception as error:  # a message from a worker may be cut short
                    waited = time.monotonic() - began
                    if self._asked() and waited > PATIENCE_OF_A_STOP:
                        raise StoppedWaitingError(f"asked to stop, and no rows came for {waited:.0f} s") from error
                    if self._stuck:
                        raise WorkerLostError(
                            f"loader worker {_numbers(self._stuck)}: nothing came for {waited:.0f} s "
                            "(--reliability.worker_seconds)"
                        ) from error
                    if ended := self._worker_ended(error):
                        raise WorkerLostError(f"loader worker {_numbers(ended)} ended unexpectedly") from error
                    if not _timed_out(error):
                        raise
        finally:
            self._since = None

    def _worker_ended(self, error: Exception) -> list[int | None]:
        """Workers that live no more. What one has handed over may be gone a moment before it is."""
        until = time.monotonic() + (0.0 if _timed_out(error) or isinstance(error, RuntimeError) else 1.0)
        while True:
            ended = [worker.pid for worker in self._workers if not worker.is_alive()]
            if ended or time.monotonic() > until:
                return ended
            time.sleep(0.05)

    def _watch(self) -> None:
        """Kill a stalled worker from a separate thread: the main thread waits for it in C, without a timeout."""
        while not self._watched.wait(LOOK_SECONDS):
            since = self._since
            if since is None:
                continue
            waited = time.monotonic() - since
            if waited > self._stuck_seconds or (waited > PATIENCE_OF_A_STOP and self._asked()):
                self._stuck = [worker.pid for worker in self._workers]
                for worker in self._workers:
                    worker.kill()
                self._since = None

    def _left_out(self, ranges: _Ranges) -> list[int]:
        """Positions whose rows end a process: they are marked in the fetcher, and left out from now on."""
        context = multiprocessing.get_context("forkserver")
        skipped = []
        for pending in tuple(ranges.pending):
            if _survives(context, _make, self._fetcher, pending):
                continue
            ends = [at for at in pending if not _survives(context, _make, self._fetcher, range(at, at + 1))]
            skipped += ends
            self._fetcher.leave_out(ends)
        return skipped

    def _forget(self) -> None:
        """Kill the workers, and drop what torch has of them."""
        _kill(self._workers)
        self._loader, self._stuck = None, []

    def close(self) -> None:
        """End the workers. Drop iterators first: torch asks the workers to end when the last one goes."""
        self._watched.set()
        self._loader, self._closed, had_workers = None, True, bool(self._workers)
        self._fetcher.close()
        self._kill_workers()
        for thread in self._feeders:  # they feed the workers' queues, and hold their semaphores for a moment longer
            thread.join(FEEDER_SECONDS)
        self._feeders = []
        if had_workers:
            # What is left of the loader in a cycle still holds semaphores. A process that then ends by os._exit leaves
            # them behind, and the standard library's tracker says so on the terminal (seen in one small run of three).
            gc.collect()


def _survives(context: Any, action: Callable[..., None], *arguments: Any) -> bool:
    """Whether a process that performs an action comes to its end; an error of the data is one."""
    process = context.Process(target=action, args=arguments, daemon=True)
    process.start()
    process.join(TRIAL_SECONDS)
    alive = process.is_alive()
    if alive:
        process.kill()
        process.join()
    return not alive and process.exitcode == 0


def _do_nothing() -> None:
    pass


def _make(fetcher: Fetcher, positions: range) -> None:
    prepare_worker(0)
    with suppress(Exception):
        fetcher.__getitems__(positions)


def _timed_out(error: Exception) -> bool:
    """Whether torch's loader says that nothing came within LOOK_SECONDS."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader timed out")


def _numbers(processes: Iterable[int | None]) -> str:
    return ", ".join(str(number) for number in processes)


def _kill(workers: list[BaseProcess]) -> None:
    """End those that live on: stuck, say in a read that does not return, and deaf to the SIGTERM torch sends."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    workers.clear()


def start_worker_server(module: str) -> None:
    """Start the process that workers are forked from, if it does not run yet; returns before it is ready.

    It imports `module` (the batch builder's) beforehand, so that workers need not.

    It inherits a signal mask with STOP_SIGNALS blocked, and so does every worker: a signal to the whole process group
    reaches the training process only, which decides with all ranks.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([module, __name__])
    multiprocessing.resource_tracker.ensure_running()  # else started below, where it would unblock the signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_worker(_: int) -> None:
    """First thing in a worker: one thread, deaf to STOP_SIGNALS, gone when the training process is gone."""
    torch.set_num_threads(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Torch watches the parent's process id, which here is the server's, and the server waits for its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _keep_batch(batch: Batch) -> Batch:
    return batch
