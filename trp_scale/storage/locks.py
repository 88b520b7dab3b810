"""Locks on files, by flock: a lock ends with its process, even if the process is killed."""

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

from trp_scale.errors import DataError, RefusedError

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What flock says on a file system that has none, such as Lustre mounted without them. Two runs of one part then only
waste time: half-made files have names of their own, and both make the same bytes."""

log = logging.getLogger(__name__)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; `False` if another process has it locked."""
    try:
        # Not lockf: its locks belong to the process, and would let a second run of this process in.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_name(path: Path, descriptor: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def lock_file(path: Path, variable: str) -> Iterator[None]:
    """Context that one process of the machine at a time is in; others wait.

    Args:
        path: of the lock file.
        variable: environment variable that chooses its directory, for the message.

    Raises:
        RefusedError: the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise RefusedError(
                f"{path}: no lock ({error.strerror}); set {variable} to a directory on a disk of this machine"
            ) from error
        yield
    finally:
        os.close(descriptor)


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
            if not _locked_by_this_run(stream.fileno(), path, deadline):
                continue
            # A run that has just ended took the file away: the lock of a file that is gone keeps nobody out.
            if has_name(path, stream.fileno()):
                stream.truncate(0)
                stream.write(f"process {os.getpid()} on {socket.gethostname()}")
                stream.flush()
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _locked_by_this_run(descriptor: int, path: Path, deadline: float) -> bool:
    """Lock the file; `False` if that is to be tried again.

    Raises:
        DataError: another run has it at the deadline.
    """
    try:
        if try_lock(descriptor):
            return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s: this file system has no locks; see that no command is run twice at once", path)
        return True
    if time.monotonic() < deadline:
        time.sleep(0.1)
        return False
    holder = os.pread(descriptor, 300, 0).decode() or "a process that has just started"
    raise DataError(
        f"--output {path.parent.parent}: another run is making this data set ({holder} holds {path}); "
        "wait for it and run the same command again, or choose another --output"
    )
