"""Requests to stop a run: signals, a time limit, and a file named STOP.

A request is heard by one rank; the loop adds up the ranks' requests in its reduction of each step, so that all ranks
finish the same step and write one checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

STOP_FILE = "STOP"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_OF_ONE_CTRL_C = 1.0


class StopRequests:
    """Context that listens for requests to stop; the handlers found at entry are put back at exit.

    SIGTERM, SIGUSR1 and the first Ctrl-C ask for a stop after the current step. A second Ctrl-C, at least a second
    later, raises KeyboardInterrupt at once (launchers pass on a Ctrl-C that the process has already had, so two within
    a second are one).

    Args:
        run_dir: where rank 0 looks for a file named STOP, at most once a second; it is removed when it is heard, so
            that the next start does not stop at once. None: no file.
        rank: this process's rank.
        max_hours: ask for a stop this many hours after entry; 0 = no limit.
        clock: seconds, never going back.

    Must be entered in the main thread (Python allows signal handlers nowhere else).
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        rank: int = 0,
        max_hours: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = run_dir / STOP_FILE if run_dir is not None and rank == 0 else None
        self._max_hours = max_hours
        self._clock = clock
        self._start = clock()
        self._looked = float("-inf")
        self._interrupted = float("-inf")
        self._reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        self._start = self._clock()
        self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> str | None:
        """Why this rank wants to stop, for the log; None while it does not. The first reason stays."""
        if self._reason is None and self._max_hours > 0:
            hours = (self._clock() - self._start) / 3600
            if hours >= self._max_hours:
                self._reason = f"--training.max_hours {self._max_hours:g} are over"
        if self._reason is None and self._file is not None and self._clock() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = self._clock()
            if self._file.exists():
                self._file.unlink(missing_ok=True)
                self._reason = f"the file {self._file}"
        return self._reason

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            first = self._interrupted == float("-inf")
            if not first and self._clock() - self._interrupted >= _SECONDS_OF_ONE_CTRL_C:
                raise KeyboardInterrupt
            if first:
                self._interrupted = self._clock()
            name = "Ctrl-C (once more: stop without a checkpoint)"
        if self._reason is None:
            self._reason = name
