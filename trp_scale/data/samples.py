"""Samples of a folder of tars: columns with the positions of their members, from the binary or the JSON indexes.

ImageNet has 1.28 million images. A process keeps 24 bytes for each (offset, length and checksum of the image, and its
class). It reads the name of an image from the index file only if the image is damaged.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config.schema import LARGEST, is_plain_name
from trp_scale.data.binary_index import NAME, BinaryIndex, IndexWriter, OrderBlocks, TarColumns, find_index
from trp_scale.data.hashing import Integers, name_hash
from trp_scale.data.index import index_path, read_index, read_index_document
from trp_scale.data.mirror import find_store
from trp_scale.data.tars import StoredPart, TarStore
from trp_scale.errors import DataError, quote, shorten
from trp_scale.storage.files import atomic_write

Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Samples in stored order: blocks of text rows, or images.

    Attributes:
        suffixes: M members that are read, in the order of the columns.
        shards: paths of the tars.
        sizes: [shards] bytes of each tar.
        starts: [shards + 1] number of the first sample of each tar; the last entry is the number of all samples.
        offsets: [n, M] int64, first byte of a member in its tar.
        lengths, checksums: [n, M] uint32, bytes and crc32 of a member.
        labels: [n] class of each image; -1 without classes.
        key_digests: [shards] hash of the keys of a tar's samples, in stored order.
        highest_label: largest class; -1 without classes.
        digest: hash of all indexes (names, all members) and tar sizes; equal on all ranks that see the same data.
        store: opens the tars.
        index: binary index that maps the columns; `None` if they come from the JSON indexes.
    """

    suffixes: tuple[str, ...]
    shards: Sequence[Path]
    sizes: Integers
    starts: Integers
    offsets: Integers
    lengths: Counts
    checksums: Counts
    labels: Integers
    key_digests: list[bytes]
    highest_label: int
    digest: str
    store: TarStore
    index: BinaryIndex | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        return super().__reduce__() if self.index is None else (_mapped_table, (self.index, self.suffixes, self.store))

    @property
    def rows(self) -> int:
        """Number of samples."""
        return int(self.starts[-1])

    def shard_number(self, sample: int) -> int:
        """Return the number of the tar that holds a sample.

        Raises:
            DataError: no such sample exists; opening a binary index does not check all of it.
        """
        if not 0 <= sample < self.rows:
            raise DataError(f"{self.shards[0].parent}: the index is damaged: sample {sample} of {self.rows}")
        return int(np.searchsorted(self.starts, sample, side="right")) - 1

    def stored_part(self, samples: range) -> StoredPart:
        """Return the tar of consecutive samples, or the part of it that the cache holds.

        Raises:
            DataError: the index is damaged.
        """
        shard = self.shard_number(samples.start)
        tar, size = self.shards[shard], int(self.sizes[shard])
        if not self.store.uses_cache or not self.store.reads_parts(tar, int(self.sizes.sum())):
            return StoredPart(tar, size)
        offsets, lengths = self.offsets[samples.start : samples.stop], self.lengths[samples.start : samples.stop]
        first, end = int(offsets.min()), int((offsets + lengths.astype(np.int64)).max())
        if not 0 <= first <= end <= size:
            raise DataError(f"{tar}: the index is damaged: bytes {first} to {end} of its {size} bytes")
        return StoredPart(tar, size, range(first, end))

    def key(self, sample: int) -> str:
        """Read "SHARD/KEY" of a sample from its index file.

        Raises:
            DataError: the index is missing or has changed.
        """
        shard = self.shard_number(sample)
        path, number = self.shards[shard], sample - int(self.starts[shard])
        blocks = read_index(path).blocks
        if number >= len(blocks):
            raise DataError(f"{path}: {len(blocks)} images in its index, at least {number + 1} when the run started")
        return f"{path.stem}/{blocks[number].key}"

    def keys(self) -> list[str]:
        """Read KEY of every sample from the index files.

        Raises:
            DataError: as `key`.
        """
        all_keys = []
        for shard, count in zip(self.shards, np.diff(self.starts).tolist(), strict=True):
            keys = read_index_document(shard).keys()
            if len(keys) != count:
                raise DataError(f"{shard}: {len(keys)} images in its index, {count} when the run started")
            all_keys += keys
        return all_keys


def read_samples(
    directory: Path,
    shards: list[str],
    suffixes: tuple[str, ...],
    rows_per_block: int | None,
    *,
    opened: tuple[str, ...] | None = None,
    use_index: bool = True,
) -> tuple[SampleTable, OrderBlocks]:
    """Read the binary index of the tars in `directory`, or else their JSON indexes, and check the tars' sizes.

    Only the listed members are ever opened. A shard with other members is refused (WebDataset's own decoder would
    unpickle .pyd and .pkl).

    Args:
        directory: directory of the tars.
        shards: file names of the tars.
        suffixes: members of every sample.
        rows_per_block: images of a block; `None` for text, whose samples are the blocks.
        opened: members that get columns; `None` for all.
        use_index: `False` reads the JSON indexes, so that `shards` may list a part of the tars.

    Raises:
        DataError: a tar or index is missing or damaged, a size differs, a sample lacks a member or has another one, a
            member extends beyond its tar, a key repeats (of text in the data set, of images in a tar), a tar is listed
            twice, no samples exist, or the binary index is older than the data.
    """
    if len(set(shards)) < len(shards):
        raise DataError(f"{directory}: a shard is listed twice; shard the data again")
    store = find_store(directory)
    opened = suffixes if opened is None else opened
    index = find_index(directory) if use_index else None
    if index is not None:
        index.check(shards, suffixes, rows_per_block, store)
        if len(index.samples):
            return _mapped_table(index, opened, store), index.blocks()
    digest = _digest(shards, suffixes, rows_per_block)
    kept = [suffixes.index(suffix) for suffix in opened]
    tars = []
    for name in shards:
        tar = _read_columns(store, _tar_path(directory, name), suffixes, rows_per_block)
        digest.add(tar)
        tars.append((tar.size, tar.key_digest(), tar.labels, tar.members[:, kept]))
    members = np.concatenate([members for _, _, _, members in tars]) if tars else np.empty((0, len(kept), 3))
    if not len(members):
        raise DataError(f"{directory}: no samples in {len(shards)} shards; shard the data again")
    labels = np.concatenate([labels for _, _, labels, _ in tars])
    counts = [len(labels) for _, _, labels, _ in tars]
    table = SampleTable(
        suffixes=opened,
        shards=[directory / name for name in shards],
        sizes=np.array([size for size, _, _, _ in tars], dtype=np.int64),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        offsets=np.ascontiguousarray(members[:, :, 0]),
        lengths=members[:, :, 1].astype(np.uint32),
        checksums=members[:, :, 2].astype(np.uint32),
        labels=labels,
        key_digests=[key_digest for _, key_digest, _, _ in tars],
        highest_label=int(labels.max()),
        digest=digest.hexdigest(),
        store=store,
    )
    return table, digest.blocks()


def write_binary_index(
    directory: Path, shards: list[str], suffixes: tuple[str, ...], rows_per_block: int | None
) -> Path:
    """Write the binary index of the tars in `directory` from their JSON indexes; return its path.

    Arguments and errors as for `read_samples`.
    """
    digest, store = _digest(shards, suffixes, rows_per_block), find_store(directory)
    with atomic_write(directory / NAME) as stream:
        writer = IndexWriter(directory, stream, suffixes)
        for name in shards:
            tar = _read_columns(store, _tar_path(directory, name), suffixes, rows_per_block)
            digest.add(tar)
            writer.add(tar)
        writer.finish(digest.blocks(), digest=digest.hexdigest(), rows_per_block=rows_per_block)
    return directory / NAME


def _digest(shards: list[str], suffixes: tuple[str, ...], rows_per_block: int | None) -> _TextDigest | _ImageDigest:
    """Return an empty hash of JSON indexes, which also collects their blocks."""
    return _TextDigest(shards, suffixes) if rows_per_block is None else _ImageDigest(shards, suffixes, rows_per_block)


class _TextDigest:
    """Hash of the indexes of text; keeps the columns of all tars, as text has few samples."""

    def __init__(self, shards: list[str], suffixes: tuple[str, ...]) -> None:
        self._names = [*suffixes, *shards]
        self._tars: list[TarColumns] = []

    def add(self, tar: TarColumns) -> None:
        self._tars.append(tar)

    def hexdigest(self) -> str:
        keys = [key for tar in self._tars for key in tar.keys]
        digest = hashlib.blake2b("\n".join([*self._names, *keys]).encode(), digest_size=16)
        members: Integers = np.concatenate([tar.members for tar in self._tars])  # [n, M, 3]
        shard = np.repeat(np.arange(len(self._tars)), [len(tar.keys) for tar in self._tars])
        sizes: Integers = np.array([tar.size for tar in self._tars], dtype=np.int64)
        rows = np.concatenate([tar.rows for tar in self._tars])
        for array in (sizes, rows, shard, members[:, :, 0], members[:, :, 1], members[:, :, 2]):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def blocks(self) -> OrderBlocks:
        """Return one block per sample.

        Raises:
            DataError: a key repeats, or no samples exist.
        """
        keys = [key for tar in self._tars for key in tar.keys]
        if not keys:
            raise DataError(f"no samples in {len(self._tars)} shards; shard the data again")
        _refuse_repeated(keys, "data set")
        identities = np.array([name_hash(key) for key in keys], dtype=np.uint64)
        rows = np.concatenate([tar.rows for tar in self._tars])
        return OrderBlocks(keys=keys, identities=identities, rows=rows, first=np.arange(len(keys)))


class _ImageDigest:
    """Hash of the indexes of images; keeps only the number of images of a tar, as 400 M images have large columns."""

    def __init__(self, shards: list[str], suffixes: tuple[str, ...], rows_per_block: int) -> None:
        self._digest = hashlib.blake2b(repr((suffixes, shards)).encode(), digest_size=16)
        self._rows_per_block = rows_per_block
        self._counts: list[tuple[str, int]] = []

    def add(self, tar: TarColumns) -> None:
        self._digest.update(f"{tar.size}\n".encode() + "\n".join(tar.keys).encode())
        self._digest.update(tar.members.tobytes() + tar.labels.tobytes())
        self._counts.append((Path(tar.name).stem, len(tar.keys)))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def blocks(self) -> OrderBlocks:
        """Return blocks of consecutive images of one tar; the last block of a tar may be shorter."""
        firsts, rows = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        keys: list[str] = []
        start = 0
        for stem, count in self._counts:
            first = np.arange(0, count, self._rows_per_block)  # [blocks of the tar]
            keys += [f"{stem}/{number}" for number in first.tolist()]
            firsts.append(start + first)
            rows.append(np.minimum(self._rows_per_block, count - first))
            start += count
        identities = np.array([name_hash(key) for key in keys], dtype=np.uint64)
        return OrderBlocks(keys=keys, identities=identities, rows=np.concatenate(rows), first=np.concatenate(firsts))


def _mapped_table(index: BinaryIndex, opened: tuple[str, ...], store: TarStore) -> SampleTable:
    """Return columns over the mapped file; members at uneven distances among the suffixes are copied."""
    numbers = [index.suffixes.index(suffix) for suffix in opened]
    steps = set(np.diff(numbers).tolist())
    even = len(steps) < 2 and min(steps, default=1) > 0
    columns: Any = slice(numbers[0], numbers[-1] + 1, min(steps, default=1)) if even else numbers
    samples = index.samples
    return SampleTable(
        suffixes=opened,
        shards=index.paths,
        sizes=index.sizes,
        starts=index.starts,
        offsets=samples["offset"][:, columns],
        lengths=samples["length"][:, columns],
        checksums=samples["checksum"][:, columns],
        labels=samples["label"],
        key_digests=index.key_digests,
        highest_label=index.highest_label,
        digest=index.digest,
        store=store,
        index=index,
    )


def _read_columns(store: TarStore, path: Path, suffixes: tuple[str, ...], rows_per_block: int | None) -> TarColumns:
    """Read the columns of one tar's JSON index and make all checks of `read_samples` that concern this tar.

    It reads the JSON objects directly: with `Block` and `StoredMember`, opening ImageNet takes three times as long.
    """
    index = read_index_document(path)
    blocks, size, keys = index.blocks, index.size, index.keys()
    if rows_per_block is None:  # text has few blocks: check all fields
        index.check_blocks()
    _check_size(store, path, index.shard, size)
    wanted = frozenset(suffixes)
    try:
        for block in blocks:
            if block["members"].keys() != wanted:
                check_members(path, block["key"], set(block["members"]), suffixes)
        positions = [
            (member["offset"], member["length"], member["crc32"])
            for block in blocks
            for member in map(block["members"].__getitem__, suffixes)
        ]
        numbers, rows = np.array(positions), np.array([block["rows"] for block in blocks])
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise index.refusal() from error
    if len(blocks) and not numbers.dtype == rows.dtype == np.int64:  # not 64-bit integers
        raise index.refusal()
    wrong = rows < 1 if rows_per_block is None else rows != 1
    if wrong.any():
        block, expected = blocks[int(wrong.argmax())], "at least 1" if rows_per_block is None else "1"
        raise DataError(f"{path}: block {shorten(block['key'])}: {quote(block['rows'])} rows, {expected} expected")
    members: Integers = numbers.astype(np.int64).reshape(len(blocks), len(suffixes), 3)
    outside = (members < 0).any(axis=(1, 2)) | (members[:, :, 0] + members[:, :, 1] > size).any(axis=1)
    outside |= (members[:, :, 1:] >= 1 << 32).any(axis=(1, 2))  # columns of 32 bits
    if outside.any():
        key = shorten(keys[int(outside.argmax())])
        raise DataError(f"{path}: block {key}: a member lies outside the tar's {size} bytes")
    _refuse_repeated(keys, str(path))
    labels = _read_labels(path, blocks, "cls" in suffixes)
    return TarColumns(name=path.name, size=size, keys=keys, rows=rows.astype(np.int64), members=members, labels=labels)


def _read_labels(path: Path, blocks: list[dict[str, Any]], labelled: bool) -> Integers:
    """Return the class of each image; -1 without classes."""
    if not labelled:
        return np.full(len(blocks), -1, dtype=np.int64)
    labels = [block.get("label") for block in blocks]
    for block, label in zip(blocks, labels, strict=True):
        if type(label) is not int or not 0 <= label <= LARGEST:
            raise DataError(
                f"{index_path(path)}: image {shorten(block['key'])}: class {quote(label)} found, a whole number "
                "from 0 expected; shard the images again"
            )
    return np.array(labels, dtype=np.int64)


def _refuse_repeated(keys: list[str], where: str) -> None:
    if len(set(keys)) < len(keys):
        repeated = next(key for key, count in Counter(keys).items() if count > 1)
        raise DataError(f"{where}: key {quote(repeated)} repeats; shard the data again")


def _tar_path(directory: Path, name: str) -> Path:
    if not is_plain_name(name):
        raise DataError(f"{directory}: shard {quote(name)} is not a plain file name")
    return directory / name


def _check_size(store: TarStore, path: Path, shard: str, size: int) -> None:
    """Compare a tar with the name and size in its index; if a server gives no size, the download compares it."""
    actual_size = store.size(path)
    if shard != path.name or actual_size not in (None, size):
        raise DataError(
            f"{path}: {actual_size} bytes found, {index_path(path).name} is of {shorten(shard)} with {size} bytes; "
            f"copy the shard again, or shard the data again"
        )


def check_members(shard: Path, key: str, suffixes: set[str], allowed: tuple[str, ...]) -> None:
    """Compare the members of a sample with the allowed ones.

    Raises:
        DataError: a member is missing or not allowed.
    """
    unlisted = sorted(suffixes - set(allowed))
    if unlisted:
        raise DataError(
            f"{shard}: block {shorten(key)} has member .{shorten(unlisted[0])}; allowed are "
            f"{', '.join('.' + name for name in allowed)} (other members are not opened, nothing is unpickled)"
        )
    missing = sorted(set(allowed) - suffixes)
    if missing:
        raise DataError(f"{shard}: block {shorten(key)} has no member .{missing[0]}; shard the data again")
