"""Arrays that the ranks and loader workers of a machine have in common: one of them computes, the others map its file.

The order of 400 M images has 6 M blocks: 100 MB in each process, and a node has a hundred processes. The files lie in
the directory for temporary files (TMPDIR). A process that uses one holds a lock on it, which goes with the process,
however that ends; whoever makes a new one removes those that nobody uses.
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
"""Smaller arrays (2 MB of 64-bit words) are computed by each process for itself."""


class NodeArray:
    """An array of this process, or one in a file; the latter pickles as its place there.

    Attributes:
        values: the array; read-only if it lies in a file.
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
        if isinstance(values, np.memmap):  # of a file that stays: a binary index
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
    """A name for what is computed from `parts`: arrays count by their content, everything else by its text."""
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
        length: of the array, or of what it is computed from.
        key: names what it is computed from; called for long ones only.
        make: computes it.

    Raises:
        DataError: there is no room for the file.
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
    """The mapped array, and the descriptor that keeps its file.

    Raises:
        FileNotFoundError: it is not there, or was taken away before it was locked.
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
            f"{path.parent}: no room for {values.nbytes} bytes of the order of the data ({error.strerror}); set TMPDIR "
            "to a directory on a disk of this machine"
        ) from error


def _remove_unused(directory: Path) -> None:
    """Remove what no process uses; called by the only process that may write."""
    remove_leftovers(directory)
    for path in directory.glob("*.npy"):
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if try_lock(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)
