"""Requests to stop a run: signals, a time limit, a file named STOP, a launcher that is gone.

A request is heard by one rank; the loop adds up the ranks' requests in its reduction of each step, so that all ranks
finish the same step and write one checkpoint.

Nothing here imports torch: a command can listen before it spends seconds on imports (`listen_early`).
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
"""Signals by which schedulers and terminals announce the end of a run."""
STOP_SIGNALS = (*NOTICES, signal.SIGINT)
"""Signals that ask a run to stop after its step. One that the process inherits as ignored (`nohup`) stays ignored."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_OF_ONE_CTRL_C = 1.0
_SECONDS_TO_RAISE = 5.0

OF_A_PERSON = ("Ctrl-C", "the file ")
"""How the reasons begin that a person gave: a batch script does not start such a run again by itself."""

_early: list[signal.Signals] = []

_first_at: float | None = None
"""When the first signal came, by time.monotonic()."""


def first_signal_time() -> float | None:
    """Return when this process first received a signal to stop, by time.monotonic(), or `None`."""
    return _first_at


def _note_time() -> None:
    global _first_at
    _first_at = time.monotonic() if _first_at is None else _first_at


def handle_signals(numbers: Iterable[signal.Signals], handler: Any) -> dict[signal.Signals, Any]:
    """Install a handler for the signals that are not ignored; return the previous handlers."""
    return {number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}


@contextmanager
def signal_handlers(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Install a handler inside the context, for the signals that are not ignored."""
    before = handle_signals(numbers, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def listen_early() -> None:
    """Note requests from now on, for the `StopRequests` that come later: first thing of a command that trains."""
    with suppress(ValueError):  # not the main thread
        handle_signals(NOTICES, lambda number, frame: note_early(signal.Signals(number)))


def note_early(number: signal.Signals) -> None:
    """A request that came before there is a run."""
    _note_time()
    _early.append(number)


def asked_early() -> str | None:
    """The signal that came before there was a run to stop; None: none did."""
    return _early[0].name if _early else None


class StopRequests:
    """Context that listens for requests to stop; the handlers found at entry are put back at exit.

    NOTICES and the first Ctrl-C ask for a stop after the current step. A second Ctrl-C, at least a second
    later, raises KeyboardInterrupt at once (launchers pass on a Ctrl-C that the process has already had, so two within
    a second are one); where this process waits for another rank, which hears no signal, it is ended.

    Args:
        run_dir: where rank 0 looks for a file named STOP, at most once a second; it is removed when it is heard, so
            that the next start does not stop at once. None: no file.
        max_hours: ask for a stop this many hours after they began; 0 = no limit.
        launchers: processes that started this one and see to it, by their numbers from the nearest on: their children
            stop when they are gone (`launchers_of`).
        clock: seconds, never going back.
        began: by the clock, when the hours began; None: at entry.

    Must be entered in the main thread (Python allows signal handlers nowhere else).
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
        self._handlers = signal_handlers(STOP_SIGNALS, self._hear)
        self._listener: _Listener | None = None
        self._gone: float | None = None

    def __enter__(self) -> StopRequests:
        self._start = self._clock() if self._began is None else self._began
        self._handlers.__enter__()
        early = asked_early()
        self._reason = self._reason or early  # a signal may have come since the first line
        self._listener = _Listener()
        return self

    def __exit__(self, *_: object) -> None:
        global _first_at
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._handlers.__exit__(None, None, None)
        _first_at = None  # the next run of a notebook's process was not asked to stop

    def reason_to_stop(self) -> str | None:
        """Return the reason of this rank's stop request, for the log, or `None`. The first reason stays."""
        if self._reason is None and self._max_hours > 0:
            hours = (self._clock() - self._start) / 3600
            if hours >= self._max_hours:
                self._reason = f"--training.max_hours {self._max_hours:g} are over"
        if self._reason is None and self._clock() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = self._clock()
            if self._file is not None and self._file.exists():
                self._file.unlink(missing_ok=True)
                self._reason = f"the file {self._file}"
            elif gone := gone_launcher(self._launchers):
                self._reason = f"its launcher, process {gone}, is gone"
        return self._reason

    def waiting_since(self) -> float | None:
        """Return when a request arrived that the main thread may not have handled yet, by time.monotonic(), or `None`.
        For other threads."""
        if self._listener is not None and self._listener.heard is not None:
            return self._listener.heard
        if self._gone is None and gone_launcher(self._launchers):
            self._gone = time.monotonic()
        return self._gone

    def _hear(self, number: int, frame: FrameType | None) -> None:
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
            hint = "; Ctrl-C once more: at once, without a checkpoint" * (number == signal.SIGINT)
            with suppress(OSError, RuntimeError):  # RuntimeError: in the middle of another print
                if self._rank == 0:
                    print(f"{name}: stopping after this step, with a checkpoint{hint}", file=sys.stderr, flush=True)


class _Listener:
    """A thread that hears signals while the main thread waits inside a library, where Python runs no handler.

    Attributes:
        heard: when the first one came, by time.monotonic(); None: none has.
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
        """Give back what signals write to."""
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
                os._exit(ExitStatus.INTERRUPTED)  # the main thread has not raised: it waits for another rank
            for number in os.read(self._read, 64):
                now = time.monotonic()
                if number in STOP_SIGNALS and self.heard is None:
                    self.heard = now
                if number == signal.SIGINT:
                    if self._interrupted is not None and now - self._interrupted >= _SECONDS_OF_ONE_CTRL_C:
                        ends = ends or now + _SECONDS_TO_RAISE
                    self._interrupted = self._interrupted or now


def launcher_processes(launcher: str, parent: int | None = None, *, forked: bool = False) -> tuple[int, ...]:
    """The processes that see to a rank of torchrun or deepspeed: its parent, and of deepspeed, whose command starts a
    process on each host that starts the ranks, the parent of that. Of others none: a shell may go, and the run with
    `nohup` stays.

    Args:
        forked: what the launcher has started has forked the rank, and looks after it: it comes first.
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


def gone_launcher(launchers: tuple[int, ...]) -> int | None:
    """The first of these that is no longer what it was: the parent of the one before, or of this process."""
    child: int | None = None
    for expected in launchers:
        parent = os.getppid() if child is None else _parent_process(child)
        if parent != expected:
            return expected
        child = expected
    return None


def _parent_process(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
