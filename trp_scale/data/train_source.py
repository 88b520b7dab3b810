"""Endless stream of training rows: cursor, prefetched micro-batches, and the split of a global batch over ranks."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder, Fetcher, MicroBatches
from trp_scale.data.plan import ByBlock, Plan
from trp_scale.data.prefetch import Share, StoredTars
from trp_scale.distributed.launchers import NodeRanks
from trp_scale.storage.cache import CacheUse

GLOBAL_BATCH = ("batch.global_size", "batch.micro_size")
"""Settings of the global and the micro-batch size."""


def check_partition(global_size: int, micro_size: int, world: int, *, flags: tuple[str, str] = GLOBAL_BATCH) -> int:
    """Return the accumulation steps, global_size / (micro_size x world).

    Args:
        flags: settings of the two sizes, for the message.

    Raises:
        RefusedError: not a whole number; the message lists the worlds and micro-batches that divide.
    """
    for name, value in ((flags[0], global_size), (flags[1], micro_size), ("world size", world)):
        if value < 1:
            raise RefusedError(f"{name}: {value} found, at least 1 allowed")
    steps, rest = divmod(global_size, micro_size * world)
    if rest == 0:
        return steps
    ranks, micros = _list_divisors(global_size, micro_size), _list_divisors(global_size, world)
    raise RefusedError(
        f"global batch {global_size} does not divide over {world} ranks x micro-batch {micro_size}: "
        f"ranks that do: {ranks}; micro-batches that do on {world} ranks: {micros} "
        f"(--{flags[0]}, --{flags[1]})"
    )


def _list_divisors(size: int, factor: int) -> str:
    """List the divisors of size / factor; "none" if that is not a whole number."""
    number, rest = divmod(size, factor)
    return "none" if rest else ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


class TrainSource:
    """Endless stream of training rows, in windows of one global batch.

    Attributes:
        rows: rows per epoch (of all members of a mixture).
        cursor: rows consumed by all ranks together; the only state.
        accumulation: micro-batches per window.
        waited_seconds: time that callers have waited for windows.
        cache_use: cache statistics of this rank's workers up to the last window.
        workers: loader processes; 0 reads in this process.
        stop_requested: returns whether the run was asked to stop; it then does not wait for late rows
            (fetch.StoppedWaitingError).
        reports_to: source whose next window also carries the keys of this source's unreadable blocks, because the loop
            counts such keys in its own windows only; `None` if the loop reads this source.

    Args:
        plan: order of the rows.
        builder: builds batches.
        config: `batch` and the loader's settings are read.
        rank, world: rank in, and size of, the data-parallel group.
        pin_memory: pin batches for copies to a GPU.
        workers: loader processes; `None` for data.workers.
        flags: settings of the two batch sizes, for messages.
        stored: data sets of the order's members (fetch.Fetcher).
        node: ranks of this machine. If there are several machines, each reads whole blocks of a global batch where
            possible (plan.ByBlock). `None` assigns rows in the order of the source.
    """

    def __init__(
        self,
        plan: Plan,
        builder: BatchBuilder,
        config: Config,
        *,
        rank: int,
        world: int,
        pin_memory: bool,
        workers: int | None = None,
        flags: tuple[str, str] = GLOBAL_BATCH,
        stored: Sequence[StoredTars] = (),
        node: NodeRanks | None = None,
    ) -> None:
        self.rows = plan.rows
        self.cursor = 0
        self.waited_seconds = 0.0
        self.reports_to: TrainSource | None = None
        self._reported: set[str] = set()
        self.accumulation = check_partition(config.batch.global_size, config.batch.micro_rows, world, flags=flags)
        self.cache_use = CacheUse()
        self._fetcher = Fetcher(plan, builder, stored)
        self._node = node if node is not None and node.several else None
        self._parts = plan, builder, stored
        self._global_size, self._micro_size = config.batch.global_size, config.batch.micro_rows
        self._rank_size = config.batch.global_size // world
        self._rank = rank
        self.workers = config.data.workers if workers is None else workers
        self._prefetch, self._pin_memory = config.data.prefetch, pin_memory
        self.stop_requested: Callable[[], bool] = lambda: False
        self._stuck_seconds = config.reliability.worker_seconds
        self._batches: MicroBatches | None = None
        self._stream: Iterator[Batch] | None = None
        self._ahead: deque[list[Batch]] = deque()

    def first_rows(self, count: int) -> Batch:
        """Read the first rows of the order in this process; equal on all ranks. The cursor does not move."""
        batch = self._fetcher.__getitems__(range(count))
        self._fetcher.close()
        return batch

    def next_window(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch.

        Rank r gets positions [cursor + r B / W, cursor + (r + 1) B / W) as contiguous micro-batches; on several
        machines the rows of the global batch are sorted by block first.
        """
        window = self._ahead.popleft() if self._ahead else self._fetch()
        self._report(window)
        self.cursor += self._global_size
        return window

    def _report(self, window: list[Batch]) -> None:
        """Pass the corrupt keys of a window to `reports_to`; add those that other sources have passed to this one."""
        if self.reports_to is not None:
            self.reports_to._reported.update(key for micro in window for key in micro.corrupt)
        if self._reported:
            window[0].corrupt = [*window[0].corrupt, *sorted(self._reported)]
            self._reported.clear()

    def peek(self, count: int) -> list[list[Batch]]:
        """Return the next `count` windows without consuming them. `next_window` returns the same objects; `seek` and
        `close` drop them."""
        while len(self._ahead) < count:
            self._ahead.append(self._fetch())
        return list(itertools.islice(self._ahead, count))

    def seek(self, cursor: int) -> None:
        """Continue at `cursor` rows; drop prefetched batches.

        Raises:
            ValueError: a negative cursor.
        """
        if cursor < 0:
            raise ValueError(f"train source: cursor {cursor} found, at least 0 allowed")
        self.close()
        self.cursor = cursor

    def close(self) -> None:
        """End the workers; the next window starts new workers."""
        self._stream = None
        self._ahead.clear()
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _fetch(self) -> list[Batch]:
        began = time.perf_counter()
        if self._stream is None:
            self._stream = self._open()
        window = [next(self._stream) for _ in range(self.accumulation)]
        for micro in window:
            self.cache_use = self.cache_use.plus(CacheUse(*micro.cache_use))
        self.waited_seconds += time.perf_counter() - began
        return window

    def _open(self) -> Iterator[Batch]:
        fetcher = self._fetcher
        if self._node is not None:
            plan, builder, stored = self._parts
            size, ranks = self._global_size, self._node
            by_block = ByBlock(plan, first=self.cursor, size=size)
            read = range(size * ranks.first // ranks.world, size * (ranks.first + ranks.count) // ranks.world)
            fetcher = Fetcher(by_block, builder, stored, Share(first=self.cursor, size=size, read=read))
        self._batches = MicroBatches(
            fetcher,
            self._positions(self.cursor),
            workers=self.workers,
            prefetch=self._prefetch,
            pin_memory=self._pin_memory,
            stuck_seconds=self._stuck_seconds,
            stop_requested=self.stop_requested,
        )
        return iter(self._batches)

    def _positions(self, cursor: int) -> Iterator[range]:
        """Yield the positions of this rank's micro-batches from `cursor` on, without end."""
        while True:
            start = cursor + self._rank * self._rank_size
            for first in range(start, start + self._rank_size, self._micro_size):
                yield range(first, first + self._micro_size)
            cursor += self._global_size


class JoinedWindows:
    """Micro-batches of the next global batch of `own`, then those of `joined`, marked as joined, on this rank.

    The micro-batches of `own` come first because they use every parameter: engines require that of the first one.
    """

    def __init__(self, own: TrainSource, joined: TrainSource) -> None:
        self.own, self.joined = own, joined

    def next_window(self) -> list[Batch]:
        """Return the micro-batches of both sources."""
        return [*self.own.next_window(), *(replace(micro, joined=True) for micro in self.joined.next_window())]
