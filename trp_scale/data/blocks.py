"""All blocks of a data set as arrays: small enough to hand to every worker, whatever the blocks hold."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config.schema import is_plain_name
from trp_scale.data.binary_index import NAME, BinaryIndex, OrderBlocks, TarColumns, find_index, new_index
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.index import ShardIndex, index_path, read_index
from trp_scale.data.stores.tars import StoredPart, find_store, reads_parts
from trp_scale.errors import DataError, quote, shorten


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
        index: the binary index that the columns are of; None: they were read from the JSON indexes.
    """

    suffixes: tuple[str, ...]
    shards: Sequence[Path]
    sizes: Integers
    keys: list[str]
    identities: Words
    rows: Integers
    shard: Integers
    offsets: Integers
    lengths: Integers
    checksums: Integers
    index: BinaryIndex | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.index is None:
            return super().__reduce__()
        return _mapped_table, (self.index,)

    def digest(self) -> str:
        """Hash of everything but the directory: equal on two ranks if they see the same indexes and tar sizes."""
        if self.index is not None:
            return self.index.digest
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join([*self.suffixes, *(path.name for path in self.shards), *self.keys]).encode())
        arrays = (self.sizes, self.rows, self.shard, self.offsets, self.lengths, self.checksums)
        for array in arrays:
            digest.update(array.tobytes())
        return digest.hexdigest()

    def stored_part(self, block: int) -> StoredPart:
        """The tar that holds a block, or the part of it that the cache holds (data/stores/tars.py: `reads_parts`).

        Raises:
            DataError: the index is damaged: the block lies outside its tar.
        """
        shard = int(self.shard[block])
        tar, size = self.shards[shard], int(self.sizes[shard])
        if not reads_parts(tar, int(self.sizes.sum())):
            return StoredPart(tar, size)
        return StoredPart(tar, size, covered(tar, size, self.offsets[block], self.lengths[block]))


def read_blocks(directory: Path, shards: list[str], suffixes: tuple[str, ...]) -> BlockTable:
    """Read the index of the tars in `directory`, the binary one if there is one, and check it against the tars' sizes.

    Members are told apart by suffix, and only the listed ones are ever opened: a shard that brings another one (.pyd
    and .pkl are what WebDataset's own decoder would unpickle) is refused as a whole.

    Raises:
        DataError: a tar or index is missing, a size differs, a block lacks a member or has one that is not listed, a
            member lies outside its tar, a block has no rows, or a key comes twice; or the binary index is damaged or
            older than the data.
    """
    index = find_index(directory)
    if index is not None:
        index.check(shards, suffixes)
        return _mapped_table(index)
    return _read_tables(directory, shards, suffixes)


def _mapped_table(index: BinaryIndex) -> BlockTable:
    """The columns over the mapped file; keys and numbers of the tars are made here, as blocks of text are few."""
    blocks = index.blocks()
    samples = index.samples
    return BlockTable(
        suffixes=index.suffixes,
        shards=index.paths,
        sizes=index.sizes,
        keys=index.keys(),
        identities=blocks.identities,
        rows=blocks.rows,
        shard=np.repeat(np.arange(len(index.tars)), index.counts),
        offsets=samples["offset"],
        lengths=samples["length"],
        checksums=samples["checksum"],
        index=index,
    )


def write_block_index(directory: Path, shards: list[str], suffixes: tuple[str, ...]) -> Path:
    """Write the binary index of the tars in `directory` from their JSON ones; returns where.

    Raises:
        DataError: as `read_blocks`.
    """
    table = _read_tables(directory, shards, suffixes)
    with new_index(directory, suffixes) as writer:
        for number, path in enumerate(table.shards):
            of_tar = slice(*np.searchsorted(table.shard, [number, number + 1]).tolist())
            columns = (table.offsets[of_tar], table.lengths[of_tar], table.checksums[of_tar])
            keys = "\n".join(table.keys[of_tar]).encode()
            members: Integers = np.stack(columns, axis=2)  # [blocks of the tar, M, 3]
            writer.add(
                TarColumns(
                    name=path.name,
                    size=int(table.sizes[number]),
                    members=members,
                    labels=np.full(len(members), -1, dtype=np.int64),
                    key_digest=hashlib.blake2b(keys, digest_size=16).digest(),
                )
            )
        first = np.arange(len(table.keys))
        blocks = OrderBlocks(identities=table.identities, rows=table.rows, first=first, keys=table.keys)
        writer.finish(blocks, digest=table.digest(), rows_per_block=None)
    return directory / NAME


def _read_tables(directory: Path, shards: list[str], suffixes: tuple[str, ...]) -> BlockTable:
    """The table from the JSON indexes, with all checks of `read_blocks`."""
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
        raise DataError(f"{directory}: block key {quote(twice[0])} comes twice; shard the data again")
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
            raise DataError(f"{path}: block {shorten(block.key)}: {block.rows} rows, at least 1 expected")
        for member in block.members.values():
            if member.offset < 0 or member.length < 0 or member.offset + member.length > index.size:
                raise DataError(
                    f"{path}: block {shorten(block.key)}: a member lies outside the tar's {index.size} bytes"
                )
    return index


def covered(tar: Path, size: int, offsets: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> range:
    """The bytes of a tar from the first of some members to the last.

    Raises:
        DataError: the index is damaged: they lie outside the tar's `size` bytes.
    """
    first, end = int(offsets.min()), int((offsets + lengths.astype(np.int64)).max())
    if not 0 <= first <= end <= size:
        raise DataError(f"{tar}: the index is damaged: bytes {first} to {end} of its {size} bytes")
    return range(first, end)


def shard_path(directory: Path, shard: str) -> Path:
    """Return the path of a listed tar.

    Raises:
        DataError: the name leads out of the directory.
    """
    if not is_plain_name(shard):
        raise DataError(f"{directory}: shard {quote(shard)} is not a plain file name")
    return directory / shard


def check_size(path: Path, shard: str, size: int) -> None:
    """Compare a tar with the name and size in its index.

    Raises:
        DataError: the tar cannot be read, or is another.
    """
    actual_size = stored_size(path)
    if actual_size is None:  # a server that does not say: compared when it is fetched
        actual_size = size
    if shard != path.name or size != actual_size:
        raise DataError(
            f"{path}: {actual_size} bytes found, {index_path(path).name} is of {shorten(shard)} with {size} bytes; "
            f"copy the shard again, or shard the data again"
        )


def stored_size(path: Path) -> int | None:
    """Bytes of a tar, where it lies; None if that is a URL whose server does not list sizes.

    Raises:
        DataError: it is not there.
    """
    store = find_store(path.parent)
    if store is not None:  # a copy in the cache may be damaged
        return store.size(path)
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def check_members(shard: Path, key: str, suffixes: set[str], allowed: tuple[str, ...]) -> None:
    """Compare the members of a block with those that every block has.

    Raises:
        DataError: one that is not listed, or one that lacks.
    """
    unlisted = sorted(suffixes - set(allowed))
    if unlisted:
        raise DataError(
            f"{shard}: block {shorten(key)} has member .{shorten(unlisted[0])}; allowed are "
            f"{', '.join('.' + name for name in allowed)} (nothing else is opened, and nothing is ever unpickled)"
        )
    missing = sorted(set(allowed) - suffixes)
    if missing:
        raise DataError(f"{shard}: block {shorten(key)} has no member .{missing[0]}; shard the data again")
