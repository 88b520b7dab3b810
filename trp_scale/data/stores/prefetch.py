"""The tars of the next positions of an order, fetched before anybody reads them.

One process of a machine does it: the first loader worker of the first rank, or that rank itself. Threads that nobody
waits for fetch what the next positions need, at most half of the cache and TARS_AHEAD tars of it; a tar that a reader
wants meanwhile is fetched by whoever comes first (storage/cache.py). An error is left to who reads the tar: it is met
there once more, with what to do about it.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch.utils.data import get_worker_info

from trp_scale.data.binary_index import first_rank_here
from trp_scale.data.hashing import Integers
from trp_scale.data.plan import Plan
from trp_scale.data.stores.tars import StoredPart, TarStore
from trp_scale.errors import RefusedError

AHEAD = "TRP_SCALE_TARS_AHEAD"
"""Environment variable: the most tars that are fetched before they are read; 0 = none."""

TARS_AHEAD = 32

THREADS = 4

_CHUNK, _CHUNKS = 1024, 32
"""Positions that are looked at together, and how many times at most."""


class StoredTars(Protocol):
    """An opened data set, as far as this file knows it."""

    def tars(self, block: int) -> list[tuple[TarStore, StoredPart]]:
        """The tars that hold a block, or the parts of them that the cache holds of it, with their stores."""
        ...


@dataclass(frozen=True, kw_only=True)
class Share:
    """The positions of each global batch that this machine's ranks read.

    Attributes:
        first: position at which a global batch begins.
        size: rows of one.
        read: places in it.
    """

    first: int
    size: int
    read: range

    def select(self, positions: Integers) -> Integers:
        """Return the positions that this rank reads."""
        places = (positions - self.first) % self.size
        return positions[(places >= self.read.start) & (places < self.read.stop)]


def most_ahead() -> int:
    """TRP_SCALE_TARS_AHEAD.

    Raises:
        RefusedError: not a whole number.
    """
    text = os.environ.get(AHEAD, "")
    if text and not text.isdecimal():
        raise RefusedError(f"{AHEAD}: {text!r} found, a whole number of tars allowed; 0 fetches none ahead")
    return int(text) if text else TARS_AHEAD


class TarsAhead:
    """Fetches the next tars of one source.

    Args:
        plan: the order; a copy of it is asked.
        stored: the data sets of the order's members.
        share: what this machine reads; None: everything.
    """

    def __init__(self, plan: Plan, stored: Sequence[StoredTars], share: Share | None = None) -> None:
        self._plan, self._stored, self._share = copy.deepcopy(plan), stored, share
        self._changed = threading.Condition()
        self._position = self._planned = -_CHUNK  # nobody reads yet
        self._planning = False
        self._wanted: deque[tuple[TarStore, StoredPart]] = deque()
        self._failed: set[StoredPart] = set()
        self._ended = False
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="TarsAhead", daemon=True).start()

    def reading(self, position: int) -> None:
        """Positions from this one on will be read."""
        with self._changed:
            self._position = position
            if self._due():
                self._changed.notify()

    def close(self) -> None:
        """Begin no more; what is under way is not waited for."""
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
            except (RefusedError, OSError):  # who reads it meets the same, and says so
                self._failed.add(wanted)

    def _look_ahead(self) -> None:
        """Note what is wanted from the planned position on; one thread at a time."""
        wanted: deque[tuple[TarStore, StoredPart]] = deque()
        try:
            wanted.extend(self._missing(self._planned))
        except (RefusedError, OSError):  # as above
            pass
        finally:
            with self._changed:
                self._wanted, self._planning = wanted, False
                self._changed.notify_all()

    def _missing(self, position: int) -> Iterator[tuple[TarStore, StoredPart]]:
        """The next tars that are not there, in the order in which they are needed."""
        room: int | None = None
        seen: set[StoredPart] = set()
        for store, part in self._next_tars(position):
            if part in seen or not store.is_remote(part.tar):
                continue
            seen.add(part)
            room = (store.room() // 2 if room is None else room) - len(part.wanted)
            if room < 0 or len(seen) > most_ahead():
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
    """The `TarsAhead` of this process; None: another process has it, or nothing is fetched."""
    worker = get_worker_info()
    if not first_rank_here() or (worker is not None and worker.id) or not most_ahead():
        return None
    if any(store.room() for block in stored for store, _ in block.tars(0)):
        return TarsAhead(plan, stored, share)
    return None
