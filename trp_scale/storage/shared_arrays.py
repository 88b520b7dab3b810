"""Arrays that the ranks and loader workers of a machine share: one process computes them, the others map the file.

The order of 400 M images has 6 M blocks, 100 MB, and a node has a hundred processes. The files are in the directory for
temporary files (TMPDIR). A process that uses a file holds a lock on it, which ends with the process. A process that
writes a new file removes the unlocked ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.errors import DataError
from trp_scale.storage.files import atomic_write, lock_file, private_directory, remove_leftovers, try_lock

SHARED_FROM = 1 << 18
"""Length from which arrays are shared (2 MB of 64-bit words)."""


class NodeArray:
    """Array of this process, or array in a file; the latter pickles as its path.

    Attributes:
        values: the array; read-only if it is in a file.
    """

    def __init__(self, values: npt.NDArray[Any] | None = None, path: Path | None = None) -> None:
        self._values, self._path = values, path
        self._lock: int | None = None
        if path is not None:
            self._values, self._lock = _open_array(path)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        values = self._values
        if self._path is not None:
            return NodeArray, (None, self._path)
        if isinstance(values, np.memmap):  # over a permanent file: a binary index
            return _map_array, (values.filename, values.dtype, values.offset, values.shape)
        return NodeArray, (values, None)

    def __del__(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> npt.NDArray[Any]:
        assert self._values is not None
        return self._values


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
