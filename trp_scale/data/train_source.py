"""The endless stream of training rows: windows, a cursor, micro-batches fetched ahead, and how a global batch is split
over ranks and micro-batches."""

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
from trp_scale.data.stores.prefetch import Share, StoredTars
from trp_scale.distributed.launchers import NodeRanks
from trp_scale.storage.cache import CacheUse

GLOBAL_BATCH = ("batch.global_size", "batch.micro_size")
"""Settings of the two sizes, of the batches that the weights learn from."""


def check_partition(global_size: int, micro_size: int, world: int, *, flags: tuple[str, str] = GLOBAL_BATCH) -> int:
    """Accumulation steps: global_size / (micro_size x world).

    Args:
        flags: settings that the two sizes come from, for the message.

    Raises:
        RefusedError: not a whole number; the message lists the worlds and micro-batches that do divide.
    """
    for name, value in ((flags[0], global_size), (flags[1], micro_size), ("world size", world)):
        if value < 1:
            raise RefusedError(f"{name}: {value} found, at least 1 allowed")
    steps, rest = divmod(global_size, micro_size * world)
    if rest == 0:
        return steps
    ranks = _join_numbers(_divisors(global_size // micro_size)) if global_size % micro_size == 0 else "none"
    micros = _join_numbers(_divisors(global_size // world)) if global_size % world == 0 else "none"
    raise RefusedError(
        f"global batch {global_size} does not divide over {world} ranks x micro-batch {micro_size}: "
        f"ranks that do: {ranks}; micro-batches that do on {world} ranks: {micros} "
        f"(--{flags[0]}, --{flags[1]})"
    )


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _join_numbers(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)


class TrainSource:
    """The endless stream of training rows, in windows of one global batch.

    Attributes:
        rows: rows per epoch (of a mixture: of all its members).
        cursor: rows consumed by all ranks together; the only state there is.
        accumulation: micro-batches per window.
        waited_seconds: time that windows and peeks have kept the caller waiting so far.
        cache_use: what this rank's workers have done with the cache of remote tars so far, up to the last window.
        workers: loader processes; 0: windows are made in this process.
        asked: whether the run was asked to stop: then it does not wait for rows (fetch.StoppedWaitingError).
        reports_to: the source whose next window also carries the keys of blocks that could not be read here. The loop
            counts such keys in its own windows only. None: the loop reads this source's windows itself.

    Args:
        plan: the order.
        builder: makes batches.
        config: `batch` and the loader's settings are read.
        rank, world: place in, and size of, the data-parallel group.
        pin_memory: for copies to a GPU.
        workers: loader processes; None = data.workers.
        flags: settings that the sizes come from, for messages.
        stored: the data sets of the order's members (fetch.Fetcher).
        node: the ranks of this machine; where there are other machines, each gets whole blocks of a global batch as far
            as can be (plan.ByBlock). None: rows go to ranks in the order of the source.
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
        self.asked: Callable[[], bool] = lambda: False
        self._stuck_seconds = config.reliability.worker_seconds
        self._batches: MicroBatches | None = None
        self._stream: Iterator[Batch] | None = None
        self._ahead: deque[list[Batch]] = deque()

    def first_rows(self, count: int) -> Batch:
        """The first rows of the order, the same on every rank, whatever the cursor; it stays. Read in this process."""
        batch = self._fetcher.__getitems__(range(count))
        self._fetcher.close()
        return batch

    def next_window(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch.

        Rank r gets positions [cursor + r B / W, cursor + (r + 1) B / W), cut into contiguous micro-batches; on several
        machines the rows of the global batch are sorted by block before that.
        """
        window = self._ahead.popleft() if self._ahead else self._fetch()
        self._report(window)
        self.cursor += self._global_size
        return window

    def _report(self, window: list[Batch]) -> None:
        """Hand the corrupt keys of a window to `reports_to`; add to it those that other sources have handed here."""
        if self.reports_to is not None:
            self.reports_to._reported.update(key for micro in window for key in micro.corrupt)
        if self._reported:
            window[0].corrupt = [*window[0].corrupt, *sorted(self._reported)]
            self._reported.clear()

    def peek(self, count: int) -> list[list[Batch]]:
        """The next `count` windows without consuming them. `next_window` gives these same objects and moves the cursor.
        `seek` and `close` drop them."""
        while len(self._ahead) < count:
            self._ahead.append(self._fetch())
        return list(itertools.islice(self._ahead, count))

    def seek(self, cursor: int) -> None:
        """Continue at `cursor` rows; whatever was fetched ahead is dropped.

        Raises:
            ValueError: a negative cursor.
        """
        if cursor < 0:
            raise ValueError(f"train source: cursor {cursor} found, at least 0 allowed")
        self.close()
        self.cursor = cursor

    def close(self) -> None:
        """End the workers; the next window starts new ones."""
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
            asked=self.asked,
        )
        return iter(self._batches)

    def _positions(self, cursor: int) -> Iterator[range]:
        """Positions of this rank's micro-batches from `cursor` on, without end."""
        while True:
            start = cursor + self._rank * self._rank_size
            for first in range(start, start + self._rank_size, self._micro_size):
                yield range(first, first + self._micro_size)
            cursor += self._global_size


class JoinedWindows:
    """This rank's micro-batches of the next global batch of one source, and after them those of another, which are
    marked as joined. Both sources keep their own cursors.

    The first ones use every parameter of the model: engines need that of a window's first micro-batch.

    Args:
        own: the window's own source.
        joined: the other.
    """

    def __init__(self, own: TrainSource, joined: TrainSource) -> None:
        self.own, self.joined = own, joined

    def next_window(self) -> list[Batch]:
        """The micro-batches of both."""
        return [*self.own.next_window(), *(replace(micro, joined=True) for micro in self.joined.next_window())]
