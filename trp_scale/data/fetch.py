"""Fetching micro-batches by position, in this process or in workers: torch's DataLoader around a plan and a builder."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trp_scale.core.batch import Batch
from trp_scale.data.ahead import Share, StoredTars, TarsAhead, tars_ahead
from trp_scale.data.plan import Addresses, Plan
from trp_scale.data.remote.cache import use_of_caches

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to stop. Process groups get them as a whole; only the training process may act on them."""


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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_ahead": None, "_asked": False}

    @property
    def module(self) -> str:
        """Where the builder is defined: what a worker has to import."""
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
        batch = self._builder.build(addresses, positions.start)
        use = use_of_caches()
        batch.cache_use = () if use is None else tuple(use)
        return batch

    def close(self) -> None:
        """Fetch no more tars ahead, in this process."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._asked = None, False


class MicroBatches:
    """The batches of the ranges that `sampler` yields, in their order, from workers or from this process.

    Workers are forked from a server process, not from this one: forking a process that runs torch's, gloo's and CUDA's
    threads can deadlock in the child. The server has imported torch once, so a worker starts in milliseconds after it.
    (As with any start method but fork, a worker imports the main script again, which must guard what it runs.)
    Workers start with the first batch, and stay for the next iteration if the sampler is iterated again.
    """

    def __init__(
        self, fetcher: Fetcher, sampler: Iterable[range], *, workers: int, prefetch: int, pin_memory: bool
    ) -> None:
        context = None
        if workers:
            start_worker_server(fetcher.module)
            context = multiprocessing.get_context("forkserver")
        self._loader: DataLoader[Batch] | None = DataLoader(
            fetcher,
            batch_sampler=sampler,  # type: ignore[arg-type]  # ranges stand for lists of positions
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            collate_fn=Batch.packed if workers or pin_memory else _unchanged,  # type: ignore[arg-type]  # of whole batches
            worker_init_fn=prepare_worker if workers else None,
            multiprocessing_context=context,
            generator=torch.Generator(),  # the default would draw from, and so move, the global generator
        )
        self._fetcher = fetcher
        self._workers: list[BaseProcess] = []
        # A process that ends without close(), say by an error before training, would send them SIGTERM, to which they
        # are deaf, and wait for them for ever.
        self._kill_workers = Finalize(self, _kill, args=(self._workers,), exitpriority=0)
        self._feeders: list[threading.Thread] = []

    def __iter__(self) -> Iterator[Batch]:
        assert self._loader is not None, "closed"
        before, threads = multiprocessing.active_children(), threading.enumerate()
        batches = iter(self._loader)
        self._workers += [child for child in multiprocessing.active_children() if child not in before]
        feeders = (thread for thread in threading.enumerate() if thread.name == "QueueFeederThread")
        self._feeders += [thread for thread in feeders if thread not in threads]
        for item in batches:
            yield item if item.wire is None else item.unpacked()

    def close(self) -> None:
        """End the workers. Drop iterators first: torch asks the workers to end when the last one goes."""
        self._loader, had_workers = None, bool(self._workers)
        self._fetcher.close()
        self._kill_workers()
        for thread in self._feeders:  # they feed the workers' queues, and hold their semaphores for a moment longer
            thread.join(FEEDER_SECONDS)
        self._feeders = []
        if had_workers:
            # What is left of the loader in a cycle still holds semaphores. A process that then ends by os._exit leaves
            # them behind, and the standard library's tracker says so on the terminal (seen in one small run of three).
            gc.collect()


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


def _unchanged(batch: Batch) -> Batch:
    return batch
