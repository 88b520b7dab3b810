"""A copy of finished checkpoints under a URL: URL/step_00000123/, with the files of the checkpoint.

checkpoint.json goes last: a directory there without it is not a checkpoint. Nothing is removed there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.errors import RefusedError
from trp_scale.storage.transfer import file_system

TRIES = 5
FIRST_PAUSE = 1.0
"""Seconds between the first two; each later one is twice as long."""

_WITHOUT_DIRECTORIES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "memory"}


class Mirror:
    """Copies one checkpoint at a time, in a thread; of several that wait, the newest.

    Args:
        url: where to.
        tell: takes a line for the log.
    """

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        self._url, self._tell = url.rstrip("/"), tell
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def submit(self, path: Path) -> None:
        """Copy this one next."""
        with self._lock:
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="trp_scale mirror", daemon=True)
                self._thread.start()

    def wanted(self) -> list[Path]:
        """Checkpoints that are still to be read."""
        with self._lock:
            return [path for path in (self._current, self._next) if path is not None]

    def finish(self, beat: Callable[[], None], until: Callable[[], float]) -> None:
        """Wait until all is copied, at most to the time, by time.monotonic(), that `until` gives now."""
        began = time.monotonic()
        while (thread := self._thread) is not None and time.monotonic() < until():
            thread.join(timeout=1.0)
            beat()
        if self._thread is not None:
            waited = time.monotonic() - began
            self._tell(f"--checkpoint.mirror {self._url}: the last checkpoint was not copied within {waited:.0f} s")
            self._stopped.set()

    def abandon(self) -> None:
        """Copy nothing more."""
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
        """One checkpoint, tried again after failures."""
        error, tried = self._attempt(path), 1
        while error is not None and tried < TRIES and not self._stopped.wait(FIRST_PAUSE * 2 ** (tried - 1)):
            error, tried = self._attempt(path), tried + 1
        if error is None:
            self._tell(f"{path.name} was copied to {self._url}")
        else:
            self._tell(
                f"--checkpoint.mirror {self._url}: {path.name} was not copied, tried {tried} times "
                f"({type(error).__name__}: {error}); the next checkpoint will be"
            )

    def _attempt(self, path: Path) -> Exception | None:
        try:
            copy(path, self._url)
        except Exception as error:  # each file system has exceptions of its own; none of them stops the run
            return error
        return None


def copy(path: Path, url: str) -> None:
    """Copy one checkpoint to URL/NAME, its document last.

    Raises:
        RefusedError: a file there has another size.
        Exception: what the file system raises.
    """
    files, root = open_url(url)
    target = f"{root.rstrip('/')}/{path.name}"
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if not protocols & _WITHOUT_DIRECTORIES:
        files.makedirs(target, exist_ok=True)
    if files.exists(f"{target}/{DOCUMENT_NAME}"):  # of the same step, before the run went back
        files.rm_file(f"{target}/{DOCUMENT_NAME}")
    sizes = {entry.name: entry.size for entry in read_document(path).files}
    sizes[DOCUMENT_NAME] = (path / DOCUMENT_NAME).stat().st_size
    for name, size in sizes.items():
        files.put_file(str(path / name), f"{target}/{name}")
        files.invalidate_cache()
        if (found := files.info(f"{target}/{name}")["size"]) != size:
            raise RefusedError(f"{url}/{path.name}/{name}: {found} bytes there, {size} were sent")


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        RefusedError: it is none, or no installed library knows it.
    """
    if "://" not in url:
        raise RefusedError(f"--checkpoint.mirror {url}: allowed: a URL, such as s3://BUCKET/RUN or file:///DIRECTORY")
    try:
        return file_system(url)
    except RefusedError as error:
        raise RefusedError(f"--checkpoint.mirror {error}") from error
