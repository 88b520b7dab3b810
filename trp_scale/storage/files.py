"""Crash-safe writing: data is flushed before a name points to it. Locks by flock, which end with their process.

A file is written under a hidden temporary name in its directory, which is unique across hosts. No other process can
know whether the writer is alive. Leftovers are therefore removed only where no writer can exist: by the run that has
locked a data set, or by `trp-scale merge`.

Arrays are shared by the ranks and loader workers of a machine: one process computes them, the others map the file. The
order of 400 M images has 6 M blocks, 100 MB, and a node has a hundred processes. The files are in the directory for
temporary files (TMPDIR). A process that uses a file holds a lock on it. A process that writes a new file removes the
unlocked ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trp_scale.errors import CheckpointError, DataError, RefusedError


def sync_directory(directory: Path) -> None:
    """Flush the entries of a directory; otherwise a renamed file may be lost in a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """Return a hidden name in the directory of `path`: .NAME.HOST-PROCESS-RANDOM.tmp"""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    # Host and process inform the user. They are not unique: containers share both.
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
    """Context with a binary stream; the complete file appears under `path` when the context ends.

    After an error the former file remains.

    Args:
        path: path in an existing directory.
        durable: flush to the disk, so that the file survives a power failure; `False` for frequent writes.
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
    """Format a document as indented JSON.

    Raises:
        CheckpointError: a value is not JSON; names the file.
    """
    try:
        return json.dumps(document, indent=1, sort_keys=sort_keys, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; only JSON values may be stored here") from error


def write_json(path: Path, document: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write indented JSON by `atomic_write`; errors as for `json_text`."""
    write_text(path, json_text(path, document, sort_keys=sort_keys))


def private_directory(name: str, variable: str) -> Path:
    """Return the directory NAME-USER among the temporary files; create it if it is missing.

    Args:
        name: purpose of the directory.
        variable: environment variable of the alternative directory, for the message.

    Raises:
        RefusedError: another user owns or may read it.
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
"""Errors of flock on a file system without locks, such as some Lustre mounts. Two runs of one part then only waste
time: temporary files have unique names, and both runs write the same bytes."""

log = logging.getLogger(__name__)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process; `False` if another process holds the lock."""
    try:
        # lockf locks belong to the process and would admit a second run in it.
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
    """Context that only one process of the machine may enter at a time; others wait.

    Args:
        path: path of the lock file.
        variable: environment variable of its directory, for the message.

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
    """Context in which no other run writes the data set `output`; the lock file is in its directory progress/.

    Args:
        output: directory of the data set.
        name: name of the lock file; runs that share the work lock a part of the data set each.
        patience: seconds to wait for another process.

    Raises:
        DataError: another process holds the lock; names it.
    """
    path = output / "progress" / name
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            stream = path.open("a+", encoding="utf-8")
        except FileNotFoundError:  # a finished run has removed the directory
            continue
        with stream:
            if not _locked_by_this_run(stream.fileno(), path, deadline):
                continue
            # A finished run may have removed the file; the lock of a removed file excludes nobody.
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
    """Lock the file; `False` to try again.

    Raises:
        DataError: another run holds the lock at the deadline.
    """
    try:
        if try_lock(descriptor):
            return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s: this file system has no locks; make sure that no command runs twice at once", path)
        return True
    if time.monotonic() < deadline:
        time.sleep(0.1)
        return False
    holder = os.pread(descriptor, 300, 0).decode() or "a process that has just started"
    raise DataError(
        f"--output {path.parent.parent}: another run is writing this data set ({holder} holds {path}); "
        "wait for it and run the same command again, or choose another --output"
    )


SHARED_FROM = 1 << 18
"""Length from which arrays are shared (2 MB of 64-bit words)."""


class NodeArray:
    """Array of this process, or array in a file; the latter pickles as its path.

    Attributes:
        values: the array; read-only if it is in a file.
    """

    def __init__(self, values: npt.NDArray[Any] | None = None, path: Path | None = None) -> None:
        self._path = path
        self._lock: int | None = None
        if path is not None:
            values, self._lock = _open_array(path)
        assert values is not None
        self.values: npt.NDArray[Any] = values

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        values = self.values
        if self._path is not None:
            return NodeArray, (None, self._path)
        if isinstance(values, np.memmap):  # over a permanent file: a binary index
            return _map_array, (values.filename, values.dtype, values.offset, values.shape)
        return NodeArray, (values, None)

    def __del__(self) -> None:
        if (lock := self.__dict__.get("_lock")) is not None:
            os.close(lock)
            self._lock = None

    def __len__(self) -> int:
        return len(self.values)


def _map_array(path: Path, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> NodeArray:
    return NodeArray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape))


def content_key(*parts: object) -> str:
    """Hash `parts` to a name: arrays by content, other values by their text."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            content = np.ascontiguousarray(part).view(np.uint8).data
        else:
            content = memoryview(str(part).encode())
        digest.update(f"{len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def node_array(length: int, key: Callable[[], str], make: Callable[[], npt.NDArray[Any]]) -> NodeArray:
    """Return the result of `make`, computed once per machine if it is long.

    Args:
        length: length of the array, or of its input.
        key: returns a name of the input; called for long arrays only.
        make: computes the array.

    Raises:
        DataError: the disk has no space for the file.
    """
    if length < SHARED_FROM:
        return NodeArray(make())
    directory = private_directory("trp_scale", "TMPDIR")
    path = directory / f"{key()}.npy"
    while True:
        with suppress(FileNotFoundError):
            return NodeArray(path=path)
        with lock_file(directory / "making.lock", "TMPDIR"):
            if not path.exists():
                _remove_unused(directory)
                _write(path, make())


def _open_array(path: Path) -> tuple[npt.NDArray[Any], int]:
    """Map the array in a file; also return the descriptor that keeps the file.

    Raises:
        FileNotFoundError: the file is missing, or was removed before it was locked.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink == 0:
            raise FileNotFoundError(path)
        return np.load(path, mmap_mode="r").view(np.ndarray), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _write(path: Path, values: npt.NDArray[Any]) -> None:
    try:
        with atomic_write(path, durable=False) as stream:
            np.save(stream, values, allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"{path.parent}: no space for {values.nbytes} bytes of the data order ({error.strerror}); set TMPDIR "
            "to a directory on a disk of this machine"
        ) from error


def _remove_unused(directory: Path) -> None:
    """Remove unlocked files; the caller holds the lock for writing."""
    remove_leftovers(directory)
    for path in directory.glob("*.npy"):
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if try_lock(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)
