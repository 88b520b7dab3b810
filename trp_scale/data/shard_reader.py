"""Arrays of a block by memory map: no copy, no unpickling, rows are read where they lie in the tar.

A memory map of a file that is cut short *while* it is mapped, or that lies on a failing disk, ends the process with
SIGBUS, and torch's DataLoader reports the worker. Shorter files are found before they are mapped.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from trp_scale.data.blocks import BlockTable
from trp_scale.data.stores.tars import StoredPart, drop_cached, open_tar
from trp_scale.errors import DataError, RefusedError

_LONGEST_HEADER = 4096


class ShardReader:
    """Opens blocks of one data set lazily; pickles as its table alone, so a worker opens its own maps.

    Args:
        table: the blocks.
        verify: check each member's crc32 the first time its block is read.
        keep: blocks kept open; a block holds its shard's map, and a map holds a file descriptor.
    """

    def __init__(self, table: BlockTable, *, verify: bool, keep: int = 128) -> None:
        self.table = table
        self._verify = verify
        self._keep = keep
        self._maps: OrderedDict[StoredPart, tuple[mmap.mmap, int]] = OrderedDict()  # with their inodes
        self._fetched_again: set[StoredPart] = set()
        self._blocks: OrderedDict[int, tuple[npt.NDArray[Any], ...]] = OrderedDict()
        self._damaged: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict(), "_blocks": OrderedDict()}

    def arrays(self, block: int) -> tuple[npt.NDArray[Any], ...]:
        """The members of a block as read-only arrays, in the order of the table's suffixes.

        Raises:
            DataError: the block cannot be read: short or missing file, bad header, wrong number of rows, checksum.
                The answer is remembered: a block does not come back to life within a process.
        """
        arrays = self._blocks.get(block)
        if arrays is not None:
            self._blocks.move_to_end(block)
            return arrays
        if block in self._damaged:
            raise DataError(self._damaged[block])
        try:
            try:
                arrays = self._open(block)
            except DataError:
                if not self._drop_cached(block):
                    raise
                arrays = self._open(block)
        except DataError as error:
            self._damaged[block] = str(error)
            raise
        self._blocks[block] = arrays
        if len(self._blocks) > self._keep:
            self._blocks.popitem(last=False)
        return arrays

    def _drop_cached(self, block: int) -> bool:
        """Drop the cached copy of the block's tar, once in a process; `False` if nothing was dropped."""
        stored = self.table.stored_part(block)
        if stored in self._fetched_again or stored not in self._maps:
            return False
        self._fetched_again.add(stored)
        dropped = drop_cached(stored, self._maps[stored][1])
        del self._maps[stored]
        return dropped

    def _open(self, block: int) -> tuple[npt.NDArray[Any], ...]:
        table = self.table
        shard = int(table.shard[block])
        stored = table.stored_part(block)
        shift = 0 if stored.part is None else stored.part.start
        view = memoryview(self._map(stored))
        arrays = []
        for position, suffix in enumerate(table.suffixes):
            where = f"{table.shards[shard]}: {table.keys[block]}.{suffix}"
            start = int(table.offsets[block, position]) - shift
            content = view[start : start + int(table.lengths[block, position])]
            if self._verify and zlib.crc32(content) != int(table.checksums[block, position]):
                raise DataError(f"{where}: checksum differs from the index")
            array = parse_npy(content, where)
            if array.ndim == 0 or len(array) != int(table.rows[block]):
                raise DataError(f"{where}: shape {array.shape} found, {int(table.rows[block])} rows expected")
            arrays.append(array)
        return tuple(arrays)

    def _map(self, stored: StoredPart) -> mmap.mmap:
        """The tar of a block, or the part of it that the cache holds."""
        path, size, part = stored
        expected = size if part is None else len(part)
        if stored not in self._maps:
            try:
                with open_tar(path, size, part) as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    inode = os.fstat(file.fileno()).st_ino
            except RefusedError:  # of the network, or there is no such tar
                raise
            except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
                raise DataError(f"{path}: cannot be mapped ({error})") from error
            if len(mapped) != expected:
                raise DataError(f"{path}: {len(mapped)} bytes found, {expected} expected")
            self._maps[stored] = mapped, inode
            if len(self._maps) > self._keep:  # arrays in use keep theirs alive
                self._maps.popitem(last=False)
        return self._maps[stored][0]


def parse_npy(content: memoryview, where: str) -> npt.NDArray[Any]:
    """An array over the bytes of a .npy member, without copying it.

    Only plain integers and floats in row order: an object array (whose content is a pickle) is refused by its header.

    Raises:
        DataError: not a .npy file, another version, type or order, or fewer bytes than its header says.
    """
    header = io.BytesIO(bytes(content[:_LONGEST_HEADER]))
    try:
        version = npy.read_magic(header)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran_order, dtype = read(header)
    except Exception as error:  # numpy reads the header as Python: a damaged one raises what its tokens lead to
        raise DataError(f"{where}: bad npy header ({type(error).__name__}: {error})") from error
    if dtype.kind not in "uif" or not dtype.isnative or fortran_order:
        raise DataError(f"{where}: {dtype.str} in {'column' if fortran_order else 'row'} order; plain numbers expected")
    count = math.prod(shape)
    available = len(content) - header.tell()
    if min(shape, default=0) < 0 or count * dtype.itemsize != available:
        raise DataError(f"{where}: {count * dtype.itemsize} bytes for shape {shape} expected, {available} found")
    return np.frombuffer(content, dtype=dtype, count=count, offset=header.tell()).reshape(shape)
