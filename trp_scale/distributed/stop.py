"""Requests to stop a run: signals, a time limit, a file named STOP, a launcher that has ended.

One rank receives a request. The loop sums the requests of all ranks in the reduction of each step, so that all ranks
finish the same step and write one checkpoint.

This module does not import torch: a command can listen before its slow imports (`listen_early`).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from trp_scale.errors import ExitStatus

STOP_FILE = "STOP"
NOTICES = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that schedulers and terminals send before they end a run."""
STOP_SIGNALS = (*NOTICES, signal.SIGINT)
"""Signals that stop a run after its step. A signal that is ignored at the start (`nohup`) stays ignored."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_OF_ONE_CTRL_C = 1.0
_SECONDS_TO_RAISE = 5.0

PERSON_REASONS = ("Ctrl-C", "the file ")
"""First words of stop requests by a person: batch scripts do not restart these runs."""

_early: list[signal.Signals] = []

_first_at: float | None = None
"""Time of the first signal, by time.monotonic()."""


def first_signal_time() -> float | None:
    """Return the time of the first signal to stop, by time.monotonic(), or `None`."""
    return _first_at


def _note_time() -> None:
    global _first_at
    _first_at = time.monotonic() if _first_at is None else _first_at


def handle_signals(numbers: Iterable[signal.Signals], handler: Any) -> dict[signal.Signals, Any]:
    """Install a handler for all signals that are not ignored; return the previous handlers."""
    return {number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}


@contextmanager
def signal_handlers(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Install a handler for all signals that are not ignored, inside the context."""
    before = handle_signals(numbers, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def listen_early() -> None:
    """Record stop signals from now on for a later `StopRequests`. A training command calls it first."""
    with suppress(ValueError):  # not the main thread
        handle_signals(NOTICES, lambda number, frame: record_early_signal(signal.Signals(number)))


def record_early_signal(number: signal.Signals) -> None:
    """Record a signal that arrived before the run."""
    _note_time()
    _early.append(number)


def early_signal() -> str | None:
    """Return the signal that arrived before the run, or `None`."""
    return _early[0].name if _early else None


class StopRequests:
    """Context that listens for stop requests; restores the signal handlers at exit. Enter it in the main thread: Python
    allows signal handlers only there.

    NOTICES and the first Ctrl-C stop the run after the current step. A second Ctrl-C, at least a second later, raises
    KeyboardInterrupt at once; if this process waits for another rank and cannot handle signals, it is ended. Two Ctrl-C
    within a second count once, because launchers forward a Ctrl-C that the process has also received.

    Args:
        run_dir: directory in which rank 0 looks for a file named STOP, at most once a second. The file is then removed,
            so that the next start does not stop. None: no file.
        max_hours: stop after this many hours; 0 = no limit.
        launchers: pids of the launchers, nearest first; the run stops if one has ended (`launcher_processes`).
        clock: monotonic clock in seconds.
        began: start of the hours, by the clock; None: at entry.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        rank: int = 0,
        max_hours: float = 0.0,
        launchers: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self._file = run_dir / STOP_FILE if run_dir is not None and rank == 0 else None
        self._rank, self._max_hours = rank, max_hours
        self._launchers = launchers
        self._clock = clock
        self._began, self._start = began, clock()
        self._looked = float("-inf")
        self._interrupted = float("-inf")
        self._reason: str | None = None
        self._handlers = signal_handlers(STOP_SIGNALS, self._handle_signal)
        self._listener: _Listener | None = None
        self._gone: float | None = None

    def __enter__(self) -> StopRequests:
        self._start = self._clock() if self._began is None else self._began
        self._handlers.__enter__()
        early = early_signal()
        self._reason = self._reason or early  # a signal may have set it after the handlers were installed
        self._listener = _Listener()
        return self

    def __exit__(self, *_: object) -> None:
        global _first_at
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._handlers.__exit__(None, None, None)
        _first_at = None  # a notebook may start another run in this process

    def reason_to_stop(self) -> str | None:
        """Return the first reason for which this rank was asked to stop, for the log, or `None`."""
        if self._reason is None and self._max_hours > 0:
            hours = (self._clock() - self._start) / 3600
            if hours >= self._max_hours:
                self._reason = f"--training.max_hours {self._max_hours:g} reached"
        if self._reason is None and self._clock() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = self._clock()
            if self._file is not None and self._file.exists():
                self._file.unlink(missing_ok=True)
                self._reason = f"the file {self._file}"
            elif gone := ended_launcher(self._launchers):
                self._reason = f"its launcher, process {gone}, has ended"
        return self._reason

    def request_time(self) -> float | None:
        """Return the time of a request that the main thread may not have handled yet, by time.monotonic(), or `None`.
        For other threads."""
        if self._listener is not None and self._listener.heard is not None:
            return self._listener.heard
        if self._gone is None and ended_launcher(self._launchers):
            self._gone = time.monotonic()
        return self._gone

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        _note_time()
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            first = self._interrupted == float("-inf")
            if not first and self._clock() - self._interrupted >= _SECONDS_OF_ONE_CTRL_C:
                raise KeyboardInterrupt
            if first:
                self._interrupted = self._clock()
            name = "Ctrl-C"
        if self._reason is None:
            self._reason = name
            hint = "; press Ctrl-C again to exit at once without a checkpoint" * (number == signal.SIGINT)
            with suppress(OSError, RuntimeError):  # RuntimeError: the signal interrupted another print
                if self._rank == 0:
                    print(f"{name}: stopping after this step, with a checkpoint{hint}", file=sys.stderr, flush=True)


class _Listener:
    """Thread that receives signals while the main thread waits inside a library, where Python runs no handler.

    Attributes:
        heard: time of the first signal, by time.monotonic(); None before it.
    """

    def __init__(self) -> None:
        self.heard: float | None = None
        self._interrupted: float | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="trp_scale signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the previous wakeup descriptor and end the thread."""
        signal.set_wakeup_fd(self._before)
        self._closed = True
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _listen(self) -> None:
        ends: float | None = None
        while not self._closed:
            patience = None if ends is None else max(0.0, ends - time.monotonic())
            if not select.select([self._read], [], [], patience)[0]:
                os._exit(ExitStatus.INTERRUPTED)  # the main thread has raised nothing: it waits for another rank
            for number in os.read(self._read, 64):
                now = time.monotonic()
                if number in STOP_SIGNALS and self.heard is None:
                    self.heard = now
                if number == signal.SIGINT:
                    if self._interrupted is not None and now - self._interrupted >= _SECONDS_OF_ONE_CTRL_C:
                        ends = ends or now + _SECONDS_TO_RAISE
                    self._interrupted = self._interrupted or now


def launcher_processes(launcher: str, parent: int | None = None, *, forked: bool = False) -> tuple[int, ...]:
    """Return the pids of a rank's launchers, nearest first. torchrun: the parent. deepspeed: the parent, which its
    command starts on each host, and that command. Others: none, because a run with `nohup` outlives its shell.

    Args:
        forked: a supervisor (restarts.py) has forked the rank; it comes first.
    """
    parent = os.getppid() if parent is None else parent
    if forked:
        above = _parent_process(parent)
        return (parent,) if above is None else (parent, *launcher_processes(launcher, above))
    if launcher == "torchrun":
        return (parent,)
    if launcher == "deepspeed":
        above = _parent_process(parent)
        return (parent,) if above is None else (parent, above)
    return ()


def ended_launcher(launchers: tuple[int, ...]) -> int | None:
    """Return the first launcher that has ended (it is no longer the parent of its child), or `None`."""
    child: int | None = None
    for expected in launchers:
        parent = os.getppid() if child is None else _parent_process(child)
        if parent != expected:
            return expected
        child = expected
    return None


def _parent_process(process: int) -> int | None:
    status = process_status(process)
    return int(status[1]) if status else None


def process_status(process: int | str) -> list[str]:
    """Return the fields of /proc/PROCESS/stat after the name; empty if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
