"""The members of a text block, and how their bytes become arrays. Nothing is ever unpickled."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trp_scale.data.index import Block, DataError

SUFFIXES = ("tokens.npy", "tags.npy", "sentences.npy")
"""Members of each block; a tar with any other is refused."""


def check_suffixes(shard: Path, block: Block) -> None:
    """Refuse a block whose members are not exactly the listed ones.

    Raises:
        DataError: naming the member; `.pyd` and `.pkl` would run code if they were decoded, so nothing else is read.
    """
    for suffix in block.members:
        if suffix not in SUFFIXES:
            raise DataError(
                f"{shard}: block {block.key}: member .{suffix} is refused; only {', '.join(SUFFIXES)} may be"
            )
    for suffix in SUFFIXES:
        if suffix not in block.members:
            raise DataError(f"{shard}: block {block.key}: member .{suffix} is missing")


def parse_array(place: str, content: bytes) -> NDArray[Any]:
    """The array in the bytes of a .npy file.

    Raises:
        DataError: not a .npy file, one of Python objects, or of another size than its header says.
    """
    stream = io.BytesIO(content)
    try:
        array = np.load(stream, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{place}: not a .npy array that may be read ({error})") from error
    if not isinstance(array, np.ndarray) or stream.tell() != len(content):
        raise DataError(f"{place}: not a single .npy array; {len(content) - stream.tell()} bytes are left behind it")
    return array


def read_block(shard: Path, block: Block) -> dict[str, NDArray[Any]]:
    """All arrays of a block by suffix, without checking checksums (`verify` does)."""
    check_suffixes(shard, block)
    arrays = {}
    with shard.open("rb") as stream:
        for suffix in SUFFIXES:
            member = block.members[suffix]
            stream.seek(member.offset)
            arrays[suffix] = parse_array(f"{shard}: block {block.key}, {suffix}", stream.read(member.length))
    return arrays
