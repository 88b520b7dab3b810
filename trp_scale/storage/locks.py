"""A lock on a data set: one run at a time makes it. The lock ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trp_scale.errors import DataError

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What flock says on a file system that has none, such as Lustre mounted without them. Two runs of one part then only
waste time: half-made files have names of their own, and both make the same bytes."""

log = logging.getLogger(__name__)


@contextmanager
def only_run(output: Path, name: str = "lock", patience: float = 0.0) -> Iterator[None]:
    """Context in which no other run makes the data set `output`; makes its directory progress/ for the lock file.

    Args:
        output: directory of the data set.
        name: of the lock file; another one, where runs share the work, is for a part of the data set.
        patience: seconds to wait for another process.

    Raises:
        DataError: another process is in this context; the message names it.
    """
    path = output / "progress" / name
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            stream = path.open("a+", encoding="utf-8")
        except FileNotFoundError:  # a run that has just ended took the directory away
            continue
        with stream:
            if not _taken(stream.fileno(), path, deadline):
                continue
            # A run that has just ended took the file away: the lock of a file that is gone keeps nobody out.
            if _is_at(path, stream.fileno()):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {socket.gethostname()}")
                stream.flush()
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _taken(descriptor: int, path: Path, deadline: float) -> bool:
    """Whether the lock is this run's now. It is tried again until the deadline."""
    try:
        # Not lockf: its locks belong to the process, and would let a second run of this process in.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            log.warning("%s: this file system has no locks; see that no command is run twice at once", path)
            return True
        if not isinstance(error, BlockingIOError):
            raise
        if time.monotonic() < deadline:
            time.sleep(0.1)
            return False
        holder = os.pread(descriptor, 300, 0).decode() or "a process that has just started"
        raise DataError(
            f"--output {path.parent.parent}: another run is making this data set ({holder} holds {path}); "
            "wait for it and run the same command again, or choose another --output"
        ) from error
    return True
