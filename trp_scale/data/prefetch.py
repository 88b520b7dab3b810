"""Prefetch the tars of the next positions of an order.

One process of a machine does it: the first loader worker of the first rank, or that rank itself. Its threads fetch up
to TARS_AHEAD tars, at most half of the cache, for the next positions. If a reader needs a tar at the same time, either
of them fetches it (storage/cache.py). Errors are ignored: the reader of the tar meets and reports them.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch.utils.data import get_worker_info

from trp_scale.data.binary_index import first_rank_here
from trp_scale.data.hashing import Integers
from trp_scale.data.plan import Plan
from trp_scale.data.tars import StoredPart, TarStore
from trp_scale.errors import RefusedError

AHEAD = "TRP_SCALE_TARS_AHEAD"
"""Environment variable: limit of prefetched tars; 0 disables prefetching."""

TARS_AHEAD = 32

THREADS = 4

_CHUNK, _CHUNKS = 1024, 32
"""Positions that are inspected together, and limit of such chunks."""


class StoredTars(Protocol):
    """Opened data set that can locate its tars."""

    def tars(self, block: int) -> list[tuple[TarStore, StoredPart]]:
        """Return the tars of a block, or the parts that the cache holds, with their stores."""
        ...


@dataclass(frozen=True, kw_only=True)
class Share:
    """Positions of each global batch that this machine's ranks read.

    Attributes:
        first: position at which a global batch starts.
        size: rows of a global batch.
        read: range of rows within a global batch.
    """

    first: int
    size: int
    read: range

    def select(self, positions: Integers) -> Integers:
        """Return the positions that this machine reads."""
        places = (positions - self.first) % self.size
        return positions[(places >= self.read.start) & (places < self.read.stop)]


def max_ahead() -> int:
    """Return TRP_SCALE_TARS_AHEAD.

    Raises:
        RefusedError: not a whole number.
    """
    text = os.environ.get(AHEAD, "")
    if text and not text.isdecimal():
        raise RefusedError(f"{AHEAD}: {text!r} found, a whole number of tars allowed; 0 disables prefetching")
    return int(text) if text else TARS_AHEAD


class TarsAhead:
    """Prefetches the next tars of one source.

    Args:
        plan: order of the rows; it is copied.
        stored: data sets of the order's members.
        share: positions that this machine reads; `None` for all.
    """

    def __init__(self, plan: Plan, stored: Sequence[StoredTars], share: Share | None = None) -> None:
        self._plan, self._stored, self._share = copy.deepcopy(plan), stored, share
        self._changed = threading.Condition()
        self._position = self._planned = -_CHUNK  # no reader yet
        self._planning = False
        self._wanted: deque[tuple[TarStore, StoredPart]] = deque()
        self._failed: set[StoredPart] = set()
        self._ended = False
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="TarsAhead", daemon=True).start()

    def reading(self, position: int) -> None:
        """Announce that positions from this one on will be read."""
        with self._changed:
            self._position = position
            if self._due():
                self._changed.notify()

    def close(self) -> None:
        """Start no more downloads; do not wait for active ones."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _due(self) -> bool:
        return not self._planning and not 0 <= self._position - self._planned < _CHUNK // 4

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._wanted or self._due())
                if self._ended:
                    return
                if due := self._due():
                    self._planned, self._planning = self._position, True
                else:
                    store, wanted = self._wanted.popleft()
            if due:
                self._look_ahead()
                continue
            try:
                store.prefetch(wanted)
            except (RefusedError, OSError):  # the reader meets the same error and reports it
                self._failed.add(wanted)

    def _look_ahead(self) -> None:
        """Queue the tars that are missing from the planned position on; one thread at a time."""
        wanted: deque[tuple[TarStore, StoredPart]] = deque()
        with suppress(RefusedError, OSError):  # as above
            wanted.extend(self._missing(self._planned))
        with self._changed:
            self._wanted, self._planning = wanted, False
            self._changed.notify_all()

    def _missing(self, position: int) -> Iterator[tuple[TarStore, StoredPart]]:
        """Yield the next missing tars in the order of their use."""
        room: int | None = None
        seen: set[StoredPart] = set()
        for store, part in self._next_tars(position):
            if part in seen or not store.is_remote(part.tar):
                continue
            seen.add(part)
            room = (store.room() // 2 if room is None else room) - len(part.wanted)
            if room < 0 or len(seen) > max_ahead():
                return
            if not store.is_local(part) and part not in self._failed:
                yield store, part

    def _next_tars(self, position: int) -> Iterator[tuple[TarStore, StoredPart]]:
        blocks: set[tuple[int, int]] = set()
        for first in range(position, position + _CHUNKS * _CHUNK, _CHUNK):
            positions = np.arange(first, first + _CHUNK, dtype=np.int64)
            positions = positions if self._share is None else self._share.select(positions)
            if not len(positions):
                continue
            addresses = self._plan.locate(positions)
            if not addresses.present.any():
                return
            for member, block, here in zip(
                addresses.member.tolist(), addresses.block.tolist(), addresses.present.tolist(), strict=True
            ):
                if here and (member, block) not in blocks:
                    blocks.add((member, block))
                    yield from self._stored[member].tars(block)


def tars_ahead(plan: Plan, stored: Sequence[StoredTars], share: Share | None = None) -> TarsAhead | None:
    """Return the `TarsAhead` of this process; `None` if another process prefetches, or nothing is remote."""
    worker = get_worker_info()
    if not first_rank_here() or (worker is not None and worker.id) or not max_ahead():
        return None
    if any(store.room() for block in stored for store, _ in block.tars(0)):
        return TarsAhead(plan, stored, share)
    return None
