"""Read the members of samples: arrays of text by memory map, bytes of images by `pread`. Nothing is unpickled.

If a file is truncated while it is mapped, or its disk fails, an access ends the process with SIGBUS, which torch's
DataLoader reports. Files are checked for their size before they are mapped.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from trp_scale.data.binary_index import OrderBlocks
from trp_scale.data.images.maps import CLASS, IMAGE
from trp_scale.data.samples import SampleTable
from trp_scale.data.tars import StoredPart
from trp_scale.errors import DataError, RefusedError, error_text

OPEN_IN_CACHE = 32
"""Limit of open tars if the cache is smaller than the data: an open tar occupies its disk space."""

Arrays = tuple[npt.NDArray[Any], ...]
"""Members of a block of text, in the order of the table's suffixes."""

Opened = TypeVar("Opened")
Content = TypeVar("Content")


class TarReader(Generic[Opened]):
    """Opens tars, or cached parts of them, on first access; pickles without open files, so that each worker opens its
    own.

    Args:
        table: the samples.
        verify: check each member's crc32.
        keep: limit of open tars; each needs a file descriptor.
    """

    def __init__(self, table: SampleTable, *, verify: bool, keep: int = 128) -> None:
        self.table = table
        self._verify = verify
        self._keep = keep
        self._files: OrderedDict[StoredPart, tuple[Opened, int]] = OrderedDict()  # and inode
        self._fetched_again: set[StoredPart] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for opened, _ in self.__dict__.get("_files", {}).values():
            self._close(opened)

    @abstractmethod
    def _attach(self, descriptor: int, stored: StoredPart) -> Opened:
        """Convert a descriptor, which it takes over, to the object that members are read from."""

    @abstractmethod
    def _close(self, opened: Opened) -> None: ...

    def _file(self, stored: StoredPart) -> Opened:
        """Open a tar or a part of it; close the least recently used one beyond the limit."""
        if stored in self._files:
            self._files.move_to_end(stored)
            return self._files[stored][0]
        try:
            descriptor = self.table.store.open(stored)
            inode = os.fstat(descriptor).st_ino
            self._files[stored] = self._attach(descriptor, stored), inode
        except RefusedError:  # a network error, or a missing tar
            raise
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataError(f"{stored.tar}: cannot be opened ({error})") from error
        if len(self._files) > self._keep:
            self._close(self._files.popitem(last=False)[1][0])
        return self._files[stored][0]

    def _retry(self, stored: StoredPart, read: Callable[[], Content]) -> Content:
        """Read; after an error drop the cached copy of the tar and read again, once per process."""
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
    """Reads blocks of text as arrays over the mapped tar, without a copy.

    Args:
        table, verify, keep: as for `TarReader`; `keep` also limits the number of kept blocks.
        blocks: blocks of the table.
    """

    def __init__(self, table: SampleTable, blocks: OrderBlocks, *, verify: bool, keep: int = 128) -> None:
        super().__init__(table, verify=verify, keep=keep)
        self.blocks = blocks
        self._arrays: OrderedDict[int, Arrays] = OrderedDict()
        self._damaged: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_arrays": OrderedDict()}

    def read(self, blocks: Iterable[int]) -> Iterator[Arrays | Exception]:
        """Yield the arrays of each block; an error in the place of a block that cannot be read."""
        for block in blocks:
            try:
                yield self.arrays(block)
            except Exception as error:  # a damaged file raises many types
                yield error

    def arrays(self, block: int) -> Arrays:
        """Read the members of a block as read-only arrays, in the order of the table's suffixes.

        Raises:
            DataError: file, header, number of rows or checksum is wrong. The process remembers the error.
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

    def _read(self, stored: StoredPart, block: int) -> Arrays:
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
        """Do nothing: the map is freed with the last array over it."""


class SampleReader(TarReader[int]):
    """Reads members of images by `pread`.

    A memory map has no advantage: an image is read once an epoch and decoded from a copy. A network file system serves
    one request for the whole image best, and a truncated file gives a short read instead of a signal.

    Args:
        table: the images.
        verify: check each member's crc32. Maps are always checked: a damaged map may decode to wrong numbers, and the
            check is cheap compared with decoding.
        keep: limit of open tars; at most OPEN_IN_CACHE if the cache is smaller than the data.
        blocks: blocks of the images, which the cache may hold one by one; `None` if it holds whole tars.
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
        if table.store.uses_cache and 0 < table.store.room() < int(table.sizes.sum()):
            self._keep = min(keep, OPEN_IN_CACHE)

    def members(self, sample: int) -> list[bytearray]:
        """Read the members of an image, in the order of the table's suffixes.

        Raises:
            DataError: the tar is missing or truncated, or a checksum differs, also in a fresh copy from the server.
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
            if offset < 0 or offset + length > stored.size:  # opening a binary index does not check all of it
                raise DataError(f"{where}: the index is damaged: the member extends beyond the tar")
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
        """Return the tar, or the part of it, that holds an image."""
        table = self.table
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
    """Header of an .npy file. Attributes: shape, dtype; fortran: column order; start: offset of the numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def is_npy(content: bytes | bytearray) -> bool:
    """Whether a file has the signature of .npy."""
    return content[: len(NPY_SIGNATURE)] == NPY_SIGNATURE


def npy_header(content: bytes | bytearray | memoryview) -> NpyHeader:
    """Parse the header of a .npy file.

    Raises:
        DataError: the array is not numeric, or the file's length does not match.
    """
    stream = io.BytesIO(bytes(content[:_LONGEST_NPY_HEADER]))
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream)
    except Exception as error:  # numpy parses the header as Python: a damaged one raises many types
        raise DataError(f"a .npy file with an unreadable header ({error_text(error)})") from error
    start = stream.tell()
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise DataError(f"a .npy file of {dtype}: integers or floats expected")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(content) - start:
        raise DataError(f"a .npy file with {len(content) - start} bytes of numbers, its header says {shape} {dtype}")
    return NpyHeader(shape, dtype, fortran, start)


def read_npy(content: bytes | bytearray) -> npt.NDArray[Any]:
    """Parse a .npy file to a read-only array in this machine's byte order.

    Raises:
        DataError: as `npy_header`.
    """
    shape, dtype, fortran, start = npy_header(content)
    numbers = np.frombuffer(bytes(content), dtype=dtype, offset=start).reshape(shape, order="F" if fortran else "C")
    return numbers.astype(dtype.newbyteorder("="), copy=False)


def parse_npy(content: memoryview, where: str) -> npt.NDArray[Any]:
    """Return an array over the bytes of a .npy member, without a copy.

    Raises:
        DataError: not a .npy file of native integers or floats in row order. Object arrays (pickles) are refused too.
    """
    try:
        shape, dtype, fortran_order, start = npy_header(content)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not dtype.isnative or fortran_order:
        raise DataError(f"{where}: {dtype.str} in {'column' if fortran_order else 'row'} order; plain numbers expected")
    return np.frombuffer(content, dtype=dtype, offset=start).reshape(shape)
