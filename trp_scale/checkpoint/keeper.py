"""Verify, remove and upload finished checkpoints in background threads of rank 0."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.document import DOCUMENT_NAME, damage, read_document
from trp_scale.checkpoint.run_directory import Kept, incompleteness, retain
from trp_scale.distributed.stop import first_signal_time
from trp_scale.errors import RefusedError
from trp_scale.storage.transfer import file_system

AT_END_SECONDS = 600.0
"""Maximum time that the end of a run waits for the upload."""

AFTER_A_SIGNAL = 200.0
"""Maximum seconds after a stop signal. launch/slurm requests the signal 300 s before the end; the last checkpoint is
written in that time too."""

TRIES = 5
FIRST_PAUSE = 1.0
"""Seconds between the first two attempts; each later pause is twice as long."""

_WITHOUT_DIRECTORIES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "memory"}


class ReadBack:
    """Find errors in the bytes of a checkpoint. Each byte is read once, from the disk if the system can drop its cache;
    later calls check only file sizes and the document."""

    def __init__(self) -> None:
        self._sound: dict[str, bytes] = {}
        self.stopped = threading.Event()

    def __call__(self, path: Path) -> str | None:
        """Return the first problem, `None` if the checkpoint is intact."""
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
    """Drop a flushed file from the system's cache, so that it is read from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class Keeper:
    """Background work on one run's checkpoints, on rank 0. `mirror`: URL to upload to; empty = none."""

    def __init__(self, run_dir: Path, mirror: str = "") -> None:
        self._run_dir = run_dir
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._problem_of = ReadBack()
        self._mirror = CheckpointUpload(mirror, self._messages.put) if mirror else None
        self._thread: threading.Thread | None = None

    def note_written(self, path: Path, kept: Kept) -> None:
        """Verify a published checkpoint and remove older ones, in a thread."""
        before = self._thread

        def work() -> None:
            lower_priority()
            if before is not None:
                before.join()
            self._keep(path, kept)

        self._thread = threading.Thread(target=work, name=f"trp_scale keeper {path.name}", daemon=True)
        self._thread.start()

    def _keep(self, path: Path, kept: Kept) -> None:
        if self._problem_of.stopped.is_set():
            return
        if problem := self._problem_of(path):
            self._messages.put(f"{path} was written but is damaged: {problem}; older checkpoints are kept")
            return
        try:
            spared = self._mirror.wanted() if self._mirror else ()
            retain(self._run_dir, path, kept, self._problem_of, spared)
        except Exception as error:  # a thread has no caller to raise to; training continues
            self._messages.put(f"checkpoints before {path.name} could not be removed: {type(error).__name__}: {error}")
        if self._mirror is not None:
            self._mirror.submit(path)

    def messages(self) -> list[str]:
        """Return the messages since the last call."""
        texts = []
        with contextlib.suppress(queue.Empty):
            while True:
                texts.append(self._messages.get_nowait())
        return texts

    def finish(self, beat: Callable[[], None]) -> None:
        """Wait until older checkpoints are removed and the newest is uploaded."""
        beat()
        if self._thread is not None:
            self._thread.join()
        if self._mirror is not None:
            began = time.monotonic()
            self._mirror.finish(beat, lambda: _upload_deadline(began))

    def abandon(self) -> None:
        """Start no more work, since the run fails."""
        self._problem_of.stopped.set()
        if self._mirror is not None:
            self._mirror.abandon()
        if self._thread is not None:
            self._thread.join(timeout=30.0)


def _upload_deadline(began: float) -> float:
    """Return the deadline of the upload, by time.monotonic(). A signal may arrive meanwhile and shorten it."""
    signalled = first_signal_time()
    return began + AT_END_SECONDS if signalled is None else min(began + AT_END_SECONDS, signalled + AFTER_A_SIGNAL)


def lower_priority() -> None:
    """Lower the priority of this thread below the steps' (Linux: niceness is per thread)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class CheckpointUpload:
    """Upload one checkpoint at a time to URL/step_00000123/, in a thread; if several wait, only the newest.

    checkpoint.json is uploaded last: a directory without it is not a checkpoint. Nothing is removed at the target.
    """

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        self._url, self._tell = url.rstrip("/"), tell
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def submit(self, path: Path) -> None:
        """Upload this checkpoint next."""
        with self._lock:
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="trp_scale mirror", daemon=True)
                self._thread.start()

    def wanted(self) -> list[Path]:
        """Return the checkpoints that are still to be read."""
        with self._lock:
            return [path for path in (self._current, self._next) if path is not None]

    def finish(self, beat: Callable[[], None], until: Callable[[], float]) -> None:
        """Wait until everything is uploaded, but not beyond `until()`, by time.monotonic()."""
        began = time.monotonic()
        while (thread := self._thread) is not None and time.monotonic() < until():
            thread.join(timeout=1.0)
            beat()
        if self._thread is not None:
            waited = time.monotonic() - began
            self._tell(f"--checkpoint.mirror {self._url}: the last checkpoint was not uploaded within {waited:.0f} s")
            self._stopped.set()

    def abandon(self) -> None:
        """Start no more uploads."""
        self._stopped.set()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._current, self._next = self._next, None
                if self._current is None or self._stopped.is_set():
                    self._thread = None
                    return
            self._copy(self._current)

    def _copy(self, path: Path) -> None:
        error, tried = self._attempt(path), 1
        while error is not None and tried < TRIES and not self._stopped.wait(FIRST_PAUSE * 2 ** (tried - 1)):
            error, tried = self._attempt(path), tried + 1
        if error is None:
            self._tell(f"{path.name} was uploaded to {self._url}")
        else:
            self._tell(
                f"--checkpoint.mirror {self._url}: {path.name} was not uploaded after {tried} attempts "
                f"({type(error).__name__}: {error}); the next checkpoint is tried when it is due"
            )

    def _attempt(self, path: Path) -> Exception | None:
        try:
            copy(path, self._url)
        except Exception as error:  # each file system has its own exceptions; none stops the run
            return error
        return None


def copy(path: Path, url: str) -> None:
    """Upload one checkpoint to URL/NAME, its document last.

    Raises:
        RefusedError: an uploaded file has another size.
        Exception: error of the file system.
    """
    files, root = open_url(url)
    target = f"{root.rstrip('/')}/{path.name}"
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if not protocols & _WITHOUT_DIRECTORIES:
        files.makedirs(target, exist_ok=True)
    if files.exists(f"{target}/{DOCUMENT_NAME}"):  # of the same step, before a rollback
        files.rm_file(f"{target}/{DOCUMENT_NAME}")
    sizes = {entry.name: entry.size for entry in read_document(path).files}
    sizes[DOCUMENT_NAME] = (path / DOCUMENT_NAME).stat().st_size
    for name, size in sizes.items():
        files.put_file(str(path / name), f"{target}/{name}")
        files.invalidate_cache()
        if (size_there := files.info(f"{target}/{name}")["size"]) != size:
            raise RefusedError(f"{url}/{path.name}/{name}: {size_there} bytes uploaded, {size} expected")


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Raises RefusedError: not a URL, or no installed library
    supports it."""
    if "://" not in url:
        raise RefusedError(f"--checkpoint.mirror {url}: allowed: a URL, such as s3://BUCKET/RUN or file:///DIRECTORY")
    try:
        return file_system(url)
    except RefusedError as error:
        raise RefusedError(f"--checkpoint.mirror {error}") from error
