"""Writing that survives a crash: data reaches the disk before a name points to it. Locks on files, by flock: a lock
ends with its process, even if the process is killed.

A file is written under a hidden temporary name in its directory. No two writers choose the same, on however many hosts.
Such a file belongs to its writer. Nobody else can tell whether the writer lives, so leftovers are removed only where no
writer can be left: by the run that has a data set for itself, or by `trp-scale merge`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trp_scale.errors import CheckpointError, DataError, RefusedError


def sync_directory(directory: Path) -> None:
    """Flush the directory's entries: without it a renamed file can be gone after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """A hidden name in the directory of `path`: .NAME.HOST-PROCESS-RANDOM.tmp"""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    # Host and process are for the user. They are not enough: containers share both.
    return path.with_name(f".{path.name}.{host}-{os.getpid()}-{secrets.token_hex(6)}.tmp")


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files and directories of writers that have ended."""
    for leftover in directory.glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Context with a binary stream to write `path` through; the file appears, whole, when the context ends.

    After an error the former file remains.

    Args:
        path: in a directory that exists.
        durable: flush to the disk, so that the file survives a power cut; False for what is written often.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write UTF-8 text by `atomic_write`."""
    with atomic_write(path, durable=durable) as stream:
        stream.write(text.encode())


def json_text(path: Path, document: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Indented JSON, for a file.

    Raises:
        CheckpointError: the document holds something that is not a JSON value; names the file.
    """
    try:
        return json.dumps(document, indent=1, sort_keys=sort_keys, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; only JSON values may be stored here") from error


def write_json(path: Path, document: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write indented JSON by `atomic_write`.

    Raises:
        CheckpointError: the document holds something that is not a JSON value.
    """
    write_text(path, json_text(path, document, sort_keys=sort_keys))


def private_directory(name: str, variable: str) -> Path:
    """Return the directory NAME-USER among the temporary files; it is made if it does not exist.

    Args:
        name: what it is for.
        variable: environment variable that chooses another directory, for the message.

    Raises:
        RefusedError: it belongs to another user, or others may read it.
    """
    directory = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or directory.is_symlink():
        raise RefusedError(
            f"{directory}: not a directory that belongs to this user alone; remove it, or set {variable}"
        )
    return directory


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
