"""All blocks of a data set as arrays: small enough to hand to every worker, whatever the blocks hold."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.index import DataError, ShardIndex, index_path, read_index


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Blocks in stored order.

    Attributes:
        suffixes: member suffixes that every block has, in the order of the arrays' columns; M of them.
        shards: tars, by number.
        sizes: [shards] bytes of each tar.
        keys: [n] key of each block.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] rows of each block.
        shard: [n] number of the tar.
        offsets, lengths, checksums: [n, M] of each member: first byte in the tar, bytes, crc32.
    """

    suffixes: tuple[str, ...]
    shards: list[Path]
    sizes: Integers
    keys: list[str]
    identities: Words
    rows: Integers
    shard: Integers
    offsets: Integers
    lengths: Integers
    checksums: Integers

    def digest(self) -> str:
        """Hash of everything but the directory: equal on two ranks if they see the same indexes and tar sizes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join([*self.suffixes, *(path.name for path in self.shards), *self.keys]).encode())
        arrays = (self.sizes, self.rows, self.shard, self.offsets, self.lengths, self.checksums)
        for array in arrays:
            digest.update(array.tobytes())
        return digest.hexdigest()


def read_blocks(directory: Path, shards: list[str], suffixes: tuple[str, ...]) -> BlockTable:
    """Read the indexes of the tars in `directory` and check them against the tars' sizes.

    Members are told apart by suffix, and only the listed ones are ever opened: a shard that brings another one (.pyd
    and .pkl are what WebDataset's own decoder would unpickle) is refused as a whole.

    Raises:
        DataError: a tar or index is missing, a size differs, a block lacks a member or has one that is not listed, a
            member lies outside its tar, a block has no rows, or a key comes twice.
    """
    paths, sizes, keys, rows, shard, members = [], [], [], [], [], []
    for number, name in enumerate(shards):
        index = _read_checked_index(directory, name, suffixes)
        paths.append(directory / name)
        sizes.append(index.size)
        for block in index.blocks:
            keys.append(block.key)
            rows.append(block.rows)
            shard.append(number)
            listed = [block.members[suffix] for suffix in suffixes]
            members.append([(member.offset, member.length, member.crc32) for member in listed])
    if not keys:
        raise DataError(f"{directory}: no blocks in {len(shards)} shards; shard the data again")
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise DataError(f"{directory}: block key {twice[0]!r} comes twice; shard the data again")
    columns: npt.NDArray[np.int64] = np.array(members, dtype=np.int64)  # [n, M, 3]
    return BlockTable(
        suffixes=suffixes,
        shards=paths,
        sizes=np.array(sizes, dtype=np.int64),
        keys=keys,
        identities=np.array([name_hash(key) for key in keys], dtype=np.uint64),
        rows=np.array(rows, dtype=np.int64),
        shard=np.array(shard, dtype=np.int64),
        offsets=np.ascontiguousarray(columns[:, :, 0]),
        lengths=np.ascontiguousarray(columns[:, :, 1]),
        checksums=np.ascontiguousarray(columns[:, :, 2]),
    )


def _read_checked_index(directory: Path, shard: str, suffixes: tuple[str, ...]) -> ShardIndex:
    """The index of one tar, after all checks of `read_blocks` that concern it alone."""
    path = shard_path(directory, shard)
    index = read_index(path)
    check_size(path, index.shard, index.size)
    for block in index.blocks:
        check_members(path, block.key, set(block.members), suffixes)
        if block.rows < 1:
            raise DataError(f"{path}: block {block.key}: {block.rows} rows, at least 1 expected")
        for member in block.members.values():
            if member.offset < 0 or member.length < 0 or member.offset + member.length > index.size:
                raise DataError(f"{path}: block {block.key}: a member lies outside the tar's {index.size} bytes")
    return index


def shard_path(directory: Path, shard: str) -> Path:
    """Where a listed tar lies.

    Raises:
        DataError: the name leads out of the directory.
    """
    if Path(shard).name != shard:
        raise DataError(f"{directory}: shard {shard!r} is not a plain file name")
    return directory / shard


def check_size(path: Path, shard: str, size: int) -> None:
    """Compare a tar with the name and size in its index.

    Raises:
        DataError: the tar cannot be read, or is another.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if shard != path.name or size != found:
        raise DataError(
            f"{path}: {found} bytes found, {index_path(path).name} is of {shard} with {size} bytes; "
            f"copy the shard again, or shard the data again"
        )


def check_members(shard: Path, key: str, found: set[str], allowed: tuple[str, ...]) -> None:
    """Compare the members of a block with those that every block has.

    Raises:
        DataError: one that is not listed, or one that lacks.
    """
    unlisted = sorted(found - set(allowed))
    if unlisted:
        raise DataError(
            f"{shard}: block {key} has member .{unlisted[0]}; allowed are {', '.join('.' + name for name in allowed)} "
            f"(nothing else is opened, and nothing is ever unpickled)"
        )
    missing = sorted(set(allowed) - found)
    if missing:
        raise DataError(f"{shard}: block {key} has no member .{missing[0]}; shard the data again")
