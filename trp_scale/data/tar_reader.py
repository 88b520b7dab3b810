"""Read the members of samples: arrays of text by memory map, bytes of images by `pread`. Nothing else in a tar is ever
opened, and nothing is ever unpickled.

A memory map of a file that is cut short *while* it is mapped, or that lies on a failing disk, ends the process with
SIGBUS, and torch's DataLoader reports the worker. Shorter files are found before they are mapped.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from trp_scale.data.binary_index import OrderBlocks
from trp_scale.data.images.maps import CLASS, IMAGE
from trp_scale.data.samples import SampleTable
from trp_scale.data.stores.tars import StoredPart
from trp_scale.errors import DataError, RefusedError, error_text

OPEN_IN_CACHE = 32
"""Tars kept open at most where the cache cannot hold all: one that is open keeps its room on the disk."""

Opened = TypeVar("Opened")
Content = TypeVar("Content")


class TarReader(Generic[Opened]):
    """Opens tars, or cached parts of them, when they are first read; pickles as its table alone, so that a worker opens
    its own.

    Args:
        table: the samples.
        verify: check each member's crc32.
        keep: tars kept open; each has a file descriptor.
    """

    def __init__(self, table: SampleTable, *, verify: bool, keep: int = 128) -> None:
        self.table = table
        self._verify = verify
        self._keep = keep
        self._files: OrderedDict[StoredPart, tuple[Opened, int]] = OrderedDict()  # with their inodes
        self._fetched_again: set[StoredPart] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for opened, _ in self.__dict__.get("_files", {}).values():
            self._close(opened)

    @abstractmethod
    def _attach(self, descriptor: int, stored: StoredPart) -> Opened:
        """Return what members are read from; takes over the descriptor."""

    @abstractmethod
    def _close(self, opened: Opened) -> None: ...

    def _file(self, stored: StoredPart) -> Opened:
        """The opened tar, or part of one; the one that was used longest ago is closed where too many are open."""
        if stored in self._files:
            self._files.move_to_end(stored)
            return self._files[stored][0]
        try:
            descriptor = self.table.store.open(stored)
            inode = os.fstat(descriptor).st_ino
            self._files[stored] = self._attach(descriptor, stored), inode
        except RefusedError:  # of the network, or there is no such tar
            raise
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataError(f"{stored.tar}: cannot be opened ({error})") from error
        if len(self._files) > self._keep:
            self._close(self._files.popitem(last=False)[1][0])
        return self._files[stored][0]

    def _retry(self, stored: StoredPart, read: Callable[[], Content]) -> Content:
        """Read, and once more after an error if the cached copy of the tar could be dropped, once in a process."""
        try:
            return read()
        except DataError:
            if stored in self._fetched_again or stored not in self._files:
                raise
            self._fetched_again.add(stored)
            opened, inode = self._files.pop(stored)
            dropped = self.table.store.drop(stored, inode)
            self._close(opened)
            if not dropped:
                raise
            return read()


class ArrayReader(TarReader[mmap.mmap]):
    """Reads blocks of text as arrays over the mapped tar: rows are read where they are stored, without a copy.

    Args:
        table, verify, keep: as of `TarReader`; as many blocks as tars are kept, too.
        blocks: of the table, with their keys and numbers of rows.
    """

    def __init__(self, table: SampleTable, blocks: OrderBlocks, *, verify: bool, keep: int = 128) -> None:
        super().__init__(table, verify=verify, keep=keep)
        self.blocks = blocks
        self._arrays: OrderedDict[int, tuple[npt.NDArray[Any], ...]] = OrderedDict()
        self._damaged: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_arrays": OrderedDict()}

    def arrays(self, block: int) -> tuple[npt.NDArray[Any], ...]:
        """The members of a block as read-only arrays, in the order of the table's suffixes.

        Raises:
            DataError: the block cannot be read: short or missing file, bad header, wrong number of rows, checksum. The
                answer is remembered for the life of the process.
        """
        arrays = self._arrays.get(block)
        if arrays is not None:
            self._arrays.move_to_end(block)
            return arrays
        if block in self._damaged:
            raise DataError(self._damaged[block])
        try:
            stored = self.table.stored_part(range(block, block + 1))
            arrays = self._retry(stored, lambda: self._read(stored, block))
        except DataError as error:
            self._damaged[block] = str(error)
            raise
        self._arrays[block] = arrays
        if len(self._arrays) > self._keep:
            self._arrays.popitem(last=False)
        return arrays

    def _read(self, stored: StoredPart, block: int) -> tuple[npt.NDArray[Any], ...]:
        table, rows = self.table, int(self.blocks.rows[block])
        view, start = memoryview(self._file(stored)), 0 if stored.part is None else stored.part.start
        arrays = []
        for position, suffix in enumerate(table.suffixes):
            where = f"{stored.tar}: {self.blocks.keys[block]}.{suffix}"
            first = int(table.offsets[block, position]) - start
            content = view[first : first + int(table.lengths[block, position])]
            if self._verify and zlib.crc32(content) != int(table.checksums[block, position]):
                raise DataError(f"{where}: checksum differs from the index")
            array = parse_npy(content, where)
            if array.ndim == 0 or len(array) != rows:
                raise DataError(f"{where}: shape {array.shape} found, {rows} rows expected")
            arrays.append(array)
        return tuple(arrays)

    def _attach(self, descriptor: int, stored: StoredPart) -> mmap.mmap:
        with os.fdopen(descriptor, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) != len(stored.wanted):
            raise DataError(f"{stored.tar}: {len(mapped)} bytes found, {len(stored.wanted)} expected")
        return mapped

    def _close(self, opened: mmap.mmap) -> None:
        """The map goes with the last array over it."""


class SampleReader(TarReader[int]):
    """Reads members of images by `pread`.

    Not by memory map, as text: an image is read once an epoch and decoded from a copy in any case, one request for the
    whole of it is what a network file system serves best, and a file cut short is a short read, not a signal.

    Args:
        table: the images.
        verify: check each member's crc32. Maps are checked in any case: a damaged one may unpack to other numbers, and
            compared with unpacking it this is nothing.
        keep: tars kept open; at most OPEN_IN_CACHE of those that the cache cannot hold all.
        blocks: of the images: the cache may hold single ones. None: it holds whole tars.
    """

    def __init__(
        self,
        table: SampleTable,
        *,
        verify: bool,
        keep: int = 128,
        blocks: OrderBlocks | None = None,
    ) -> None:
        super().__init__(table, verify=verify, keep=keep)
        self._blocks = blocks
        self._is_limited = False

    def members(self, sample: int) -> list[bytearray]:
        """The members of an image, in the order of the table's suffixes.

        Raises:
            DataError: the tar is missing or is shorter than at the start, or a checksum differs; also after a cached
                copy was fetched again.
        """
        stored = self._stored_part(sample)
        return self._retry(stored, lambda: self._read(stored, sample))

    def _read(self, stored: StoredPart, sample: int) -> list[bytearray]:
        table = self.table
        descriptor, start = self._file(stored), 0 if stored.part is None else stored.part.start
        contents = []
        for position, suffix in enumerate(table.suffixes):
            offset, length = int(table.offsets[sample, position]), int(table.lengths[sample, position])
            where = f"{stored.tar}: image {sample - int(table.starts[table.shard_number(sample)])}, .{suffix}"
            if offset < 0 or offset + length > stored.size:  # a binary index is not checked as a whole
                raise DataError(f"{where}: the index is damaged: the member lies outside the tar")
            content = bytearray(length)
            try:
                count = os.preadv(descriptor, [content], offset - start)
            except OSError as error:
                raise DataError(f"{where}: cannot be read ({error.strerror})") from error
            if count != len(content):
                raise DataError(f"{where}: {count} bytes found, {len(content)} expected")
            checked = self._verify or suffix not in (IMAGE, CLASS)
            if checked and zlib.crc32(content) != int(table.checksums[sample, position]):
                raise DataError(f"{where}: checksum differs from the index")
            contents.append(content)
        return contents

    def _stored_part(self, sample: int) -> StoredPart:
        """The tar, or the part of it, that holds an image."""
        table = self.table
        if not self._is_limited:  # at the first image
            self._is_limited = True
            if table.store.uses_cache and 0 < table.store.room() < int(table.sizes.sum()):
                self._keep = min(self._keep, OPEN_IN_CACHE)
        if self._blocks is None:
            shard = table.shard_number(sample)
            return StoredPart(table.shards[shard], int(table.sizes[shard]))
        first = self._blocks.first
        number = int(np.searchsorted(first, sample, side="right"))
        end = int(first[number]) if number < len(first) else table.rows
        return table.stored_part(range(int(first[number - 1]), end))

    def _attach(self, descriptor: int, stored: StoredPart) -> int:
        return descriptor

    def _close(self, opened: int) -> None:
        os.close(opened)


NPY_SIGNATURE = b"\x93NUMPY"
_LONGEST_NPY_HEADER = 4096


class NpyHeader(NamedTuple):
    """Header of an .npy file. Attributes: shape, dtype; fortran: columns first; start: of the numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def is_npy(content: bytes | bytearray) -> bool:
    """Whether a file begins as a .npy does."""
    return content[: len(NPY_SIGNATURE)] == NPY_SIGNATURE


def npy_header(content: bytes | bytearray | memoryview) -> NpyHeader:
    """The header of a .npy file.

    Raises:
        DataError: not one of numbers, or of another length than it says.
    """
    stream = io.BytesIO(bytes(content[:_LONGEST_NPY_HEADER]))
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream)
    except Exception as error:  # numpy reads the header as Python: a broken one raises what its tokens lead to
        raise DataError(f"a .npy file whose header cannot be read ({error_text(error)})") from error
    start = stream.tell()
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise DataError(f"a .npy file of {dtype}: whole numbers or floats expected")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(content) - start:
        raise DataError(f"a .npy file of {len(content) - start} bytes of numbers, but its header says {shape} {dtype}")
    return NpyHeader(shape, dtype, fortran, start)


def read_npy(content: bytes | bytearray) -> npt.NDArray[Any]:
    """The numbers of a .npy file, read-only, in this machine's byte order.

    Raises:
        DataError: as `npy_header`.
    """
    shape, dtype, fortran, start = npy_header(content)
    numbers = np.frombuffer(bytes(content), dtype=dtype, offset=start).reshape(shape, order="F" if fortran else "C")
    return numbers.astype(dtype.newbyteorder("="), copy=False)


def parse_npy(content: memoryview, where: str) -> npt.NDArray[Any]:
    """An array over the bytes of a .npy member, without copying it.

    Only plain integers and floats in row order: an object array (whose content is a pickle) is refused by its header.

    Raises:
        DataError: not a .npy file, another version, type or order, or fewer bytes than its header says.
    """
    try:
        shape, dtype, fortran_order, start = npy_header(content)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not dtype.isnative or fortran_order:
        raise DataError(f"{where}: {dtype.str} in {'column' if fortran_order else 'row'} order; plain numbers expected")
    return np.frombuffer(content, dtype=dtype, offset=start).reshape(shape)
