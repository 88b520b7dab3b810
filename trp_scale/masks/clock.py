"""Which share of the time each level takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST = 256
"""Marks on a GPU that are kept unread."""


class LevelClock:
    """Seconds spent in named parts since they were last asked for.

    On a GPU parts are marked in its stream, and nothing waits until they are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What is inside counts as `name`."""
        if not self.gpu:
            began = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))
        while len(self._events) > MOST and self._events[0][2].query():  # type: ignore[no-untyped-call]
            self._take(*self._events.pop(0))  # ranks that log nothing never ask

    def _take(self, name: str, first: torch.cuda.Event, last: torch.cuda.Event) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + first.elapsed_time(last) / 1000

    def shares(self) -> dict[str, float]:
        """Each part's share of the time since the last call; the rest is level I's. Waits for the device."""
        for name, first, last in self._events:
            last.synchronize()
            self._take(name, first, last)
        whole = time.perf_counter() - self._since
        found = {name: seconds / whole for name, seconds in self._seconds.items()} if whole > 0 else {}
        self._seconds, self._events, self._since = {}, [], time.perf_counter()
        return found
