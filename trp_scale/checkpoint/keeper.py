"""Keep finished checkpoints in the background, on rank 0 alone: read back their bytes, remove older ones, and copy to
the upload target."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.checkpoint.run_directory import Kept, incompleteness, retain
from trp_scale.checkpoint.tensor_file import damage
from trp_scale.checkpoint.upload import Mirror
from trp_scale.distributed.stop import first_signal_time

AT_END_SECONDS = 600.0
"""How long the end of a run waits for the copy to the mirror."""

AFTER_A_SIGNAL = 200.0
"""How long after a signal to stop it waits at most. launch/slurm asks for the signal 300 s before the end; the last
checkpoint is written in that time too."""


class ReadBack:
    """Errors in the bytes of a checkpoint. Each byte is read once, from the disk if the system can drop its cache; file
    sizes and the document are checked after that. Each is read once, from the disk where the system lets go of what it
    holds in memory; after that its files' sizes and its document are looked at."""

    def __init__(self) -> None:
        self._sound: dict[str, bytes] = {}
        self.stopped = threading.Event()

    def __call__(self, path: Path) -> str | None:
        """None for a sound one."""
        if problem := incompleteness(path):
            return problem
        try:
            document = hashlib.sha256((path / DOCUMENT_NAME).read_bytes()).digest()
            if self._sound.get(path.name) == document:
                return None
            for entry in read_document(path).files:
                if self.stopped.is_set():
                    return f"{path}: not read to its end"
                forget_cached(path / entry.name)
                if problem := damage(path, entry):
                    return problem
        except OSError as error:
            return f"{path}: cannot be read ({error})"
        self._sound[path.name] = document
        return None


def forget_cached(path: Path) -> None:
    """Have the system let go of a flushed file's content, so that it is read from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class Keeper:
    """Keeper of one run's checkpoints, on rank 0.

    Args:
        run_dir: where the checkpoints are.
        mirror: URL that they are copied to; empty = none.
    """

    def __init__(self, run_dir: Path, mirror: str = "") -> None:
        self._run_dir = run_dir
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._problem_of = ReadBack()
        self._mirror = Mirror(mirror, self._messages.put) if mirror else None
        self._thread: threading.Thread | None = None

    def written(self, path: Path, kept: Kept) -> None:
        """A checkpoint has its name."""
        before = self._thread

        def work() -> None:
            polite()
            if before is not None:
                before.join()
            self._keep(path, kept)

        self._thread = threading.Thread(target=work, name=f"trp_scale keeper {path.name}", daemon=True)
        self._thread.start()

    def _keep(self, path: Path, kept: Kept) -> None:
        if self._problem_of.stopped.is_set():
            return
        if problem := self._problem_of(path):
            self._messages.put(f"{path} was written and does not read back: {problem}; no older one is removed")
            return
        try:
            spared = self._mirror.wanted() if self._mirror else ()
            retain(self._run_dir, path, kept, self._problem_of, spared)
        except Exception as error:  # a thread has no one to raise it to; training goes on
            self._messages.put(
                f"older checkpoints than {path.name} could not be removed: {type(error).__name__}: {error}"
            )
        if self._mirror is not None:
            self._mirror.submit(path)

    def messages(self) -> list[str]:
        """Return the messages since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._messages.get_nowait())
        return found

    def finish(self, beat: Callable[[], None]) -> None:
        """Wait until older ones are removed and the mirror has the newest.

        Args:
            beat: told that this gets on.
        """
        beat()
        if self._thread is not None:
            self._thread.join()
        if self._mirror is not None:
            began = time.monotonic()
            self._mirror.finish(beat, lambda: _end_of_patience(began))

    def abandon(self) -> None:
        """The run breaks: begin nothing more."""
        self._problem_of.stopped.set()
        if self._mirror is not None:
            self._mirror.abandon()
        if self._thread is not None:
            self._thread.join(timeout=30.0)


def _end_of_patience(began: float) -> float:
    """Return the time to give up waiting for the upload, by time.monotonic(). A signal may come meanwhile."""
    signalled = first_signal_time()
    return began + AT_END_SECONDS if signalled is None else min(began + AT_END_SECONDS, signalled + AFTER_A_SIGNAL)


def polite() -> None:
    """Have this thread's work give way to the steps' (Linux: each thread has a niceness of its own)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
