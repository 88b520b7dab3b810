"""Read the members of image samples: columns with their offsets in each tar, and their bytes. Nothing else in a tar is
ever opened.

ImageNet has 1.28 million images in about as many shards as text has for a thousandth of the samples. A process keeps 24
bytes for each (offset, length and checksum of the image, and its class) and no names: a name is looked up in the index
file when an image turns out to be damaged.

Maps may lie in tars of their own, joined to their images by position: DATASET/DIRECTORY/image-000000.tar then holds the
maps of the images in DATASET/shards/image-000000.tar, under the same keys in the same order.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trp_scale.config.schema import LARGEST
from trp_scale.data.binary_index import BinaryIndex, IndexWriter, TarColumns, find_index
from trp_scale.data.blocks import check_members, check_size, covered, shard_path
from trp_scale.data.hashing import Integers
from trp_scale.data.images.maps import StoredMaps, map_formats
from trp_scale.data.index import index_path, read_index, read_index_document
from trp_scale.data.stores.tars import StoredPart, TarStore, drop_cached, find_store, reads_parts, tar_descriptor
from trp_scale.errors import DataError, quote, shorten

IMAGE, CLASS = "jpg", "cls"
"""The image, and its class as an ASCII integer."""

OWN_MODALITY = "; --module registers a modality of your own"
"""Ends the refusal of a member that no modality has."""


def known_suffixes() -> tuple[str, ...]:
    """Members that a sample may have, in their order; every sample of a data set has the same ones."""
    return (IMAGE, CLASS, *(form.suffix for form in map_formats().values()))


def ordered_suffixes(suffixes: Collection[str]) -> tuple[str, ...]:
    """The suffixes in the order of `known_suffixes`."""
    return tuple(suffix for suffix in known_suffixes() if suffix in suffixes)


OPEN_IN_CACHE = 32
"""Tars kept open at most where the cache cannot hold all: one that is open keeps its room on the disk."""

Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Images in stored order.

    Attributes:
        suffixes: members that are read, in the order of the columns; M of them.
        shards: tars, by number.
        sizes: [shards] bytes of each tar.
        starts: [shards + 1] number of the first image of each tar; the last entry is the number of all images.
        offsets: [n, M] int64, first byte of a member in its tar.
        lengths, checksums: [n, M] uint32, bytes and crc32 of a member.
        labels: [n] class of each image; -1 where images have none.
        key_digests: [shards] hash of the keys of a tar's images, in their order.
        highest_label: the largest class; -1 where images have none.
        digest: hash of all indexes (names, all members) and tar sizes.
        index: the binary index whose mapped file the columns are; None: they were read from the JSON indexes.
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
    index: BinaryIndex | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.index is None:
            return super().__reduce__()
        return _mapped_table, (self.index, self.suffixes)

    @property
    def rows(self) -> int:
        """Number of images."""
        return int(self.starts[-1])

    def shard_of(self, sample: int) -> int:
        """Number of the tar that holds an image.

        Raises:
            DataError: there is no such image: a binary index is not read as a whole before.
        """
        if not 0 <= sample < self.rows:
            raise DataError(f"{self.shards[0].parent}: the index is damaged: image {sample} of {self.rows}")
        return int(np.searchsorted(self.starts, sample, side="right")) - 1

    def key(self, sample: int) -> str:
        """ "SHARD/KEY" of an image, from its index file.

        Raises:
            DataError: the index is no longer there, or has fewer images than at the start.
        """
        shard = self.shard_of(sample)
        path, number = self.shards[shard], sample - int(self.starts[shard])
        blocks = read_index(path).blocks
        if number >= len(blocks):
            raise DataError(f"{path}: {len(blocks)} images in its index, {number + 1} or more at the start of the run")
        return f"{path.stem}/{blocks[number].key}"

    def keys(self) -> list[str]:
        """KEY of every image, from the index files.

        Raises:
            DataError: as `key`.
        """
        all_keys = []
        for shard, count in zip(self.shards, np.diff(self.starts).tolist(), strict=True):
            keys = read_index_document(shard).keys()
            if len(keys) != count:
                raise DataError(f"{shard}: {len(keys)} images in its index, {count} at the start of the run")
            all_keys += keys
        return all_keys


def read_samples(
    directory: Path,
    shards: list[str],
    suffixes: tuple[str, ...],
    opened: tuple[str, ...],
    rows_per_block: int | None = None,
) -> SampleTable:
    """Read the index of the tars in `directory`, the binary one if there is one, and check it against the tars' sizes.

    Args:
        directory: of the tars.
        shards: their file names.
        suffixes: members that every image has; an image that lacks one, or brings another, refuses the shard.
        opened: those among them that will be read; only these get columns.
        rows_per_block: that a binary index must be of; None: the JSON indexes are read, for some of the tars.

    Raises:
        DataError: a tar or index is missing, a size differs, an image lacks a member or has one that is not listed, a
            member lies outside its tar, an image of several rows, a key that comes twice in a shard, a shard that is
            listed twice, or no images at all; or the binary index is damaged or older than the data.
    """
    if len(set(shards)) < len(shards):
        raise DataError(f"{directory}: a shard is listed twice; shard the images again")
    index = None if rows_per_block is None else find_index(directory)
    if index is not None:
        index.check(shards, suffixes, rows_per_block)
        if index.counts.sum():
            return _mapped_table(index, opened)
    labels, columns, tars = [], [], []
    digest = _JoinedDigest(shards, suffixes)
    for tar in digest.joined(directory):
        labels.append(tar.labels)
        kept = tar.members[:, [suffixes.index(suffix) for suffix in opened]]  # [images of the shard, M, 3]
        columns.append((kept[:, :, 0], kept[:, :, 1].astype(np.uint32), kept[:, :, 2].astype(np.uint32)))
        tars.append((directory / tar.name, tar.size, len(tar.members), tar.key_digest))
    if not sum(count for _, _, count, _ in tars):
        raise DataError(f"{directory}: no images in {len(shards)} shards; shard the images again")
    classes = np.concatenate(labels)
    return SampleTable(
        suffixes=opened,
        shards=[path for path, _, _, _ in tars],
        sizes=np.array([size for _, size, _, _ in tars], dtype=np.int64),
        starts=_starts([count for _, _, count, _ in tars]),
        offsets=np.concatenate([offsets for offsets, _, _ in columns]),
        lengths=np.concatenate([lengths for _, lengths, _ in columns]),
        checksums=np.concatenate([checksums for _, _, checksums in columns]),
        labels=classes,
        key_digests=[key_digest for _, _, _, key_digest in tars],
        highest_label=int(classes.max()),
        digest=digest.hexdigest(),
    )


def write_samples(writer: IndexWriter, directory: Path, shards: list[str], suffixes: tuple[str, ...]) -> str:
    """Write the samples of a binary index from the JSON ones; returns the digest of their `SampleTable`.

    Raises:
        DataError: as `read_samples`.
    """
    digest = _JoinedDigest(shards, suffixes)
    for tar in digest.joined(directory):
        writer.add(tar)
    return digest.hexdigest()


class _JoinedDigest:
    """Columns of one tar after another, and the hash of all."""

    def __init__(self, shards: list[str], suffixes: tuple[str, ...]) -> None:
        self._shards, self._suffixes = shards, suffixes
        self._digest = hashlib.blake2b(repr((suffixes, shards)).encode(), digest_size=16)

    def joined(self, directory: Path) -> Iterator[TarColumns]:
        for name in self._shards:
            size, keys, members, classes = _read_columns(shard_path(directory, name), self._suffixes)
            names = "\n".join(keys).encode()
            self._digest.update(f"{size}\n".encode() + names)
            self._digest.update(members.tobytes() + classes.tobytes())
            key_digest = hashlib.blake2b(names, digest_size=16).digest()
            yield TarColumns(name=name, size=size, members=members, labels=classes, key_digest=key_digest)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _starts(counts: list[int] | Integers) -> Integers:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _mapped_table(index: BinaryIndex, opened: tuple[str, ...]) -> SampleTable:
    """The columns over the mapped file. Members that do not lie at even distances among the suffixes are copied."""
    places = [index.suffixes.index(suffix) for suffix in opened]
    steps = set(np.diff(places).tolist())
    even = len(steps) < 2 and min(steps, default=1) > 0
    step = min(steps, default=1)
    columns: Any = slice(places[0], places[-1] + 1, step) if even else places
    samples = index.samples
    return SampleTable(
        suffixes=opened,
        shards=index.paths,
        sizes=index.sizes,
        starts=_starts(index.counts),
        offsets=samples["offset"][:, columns],
        lengths=samples["length"][:, columns],
        checksums=samples["checksum"][:, columns],
        labels=samples["label"],
        key_digests=index.key_digests,
        highest_label=index.highest_label,
        digest=index.digest,
        index=index,
    )


def _read_columns(path: Path, suffixes: tuple[str, ...]) -> tuple[int, list[str], Integers, Integers]:
    """Size, keys, offset, length and checksum of every member, [images, suffixes, 3], and classes, [images], of one
    shard.

    Straight from the JSON: with `Block`s and `Member`s between, opening ImageNet takes three times as long.
    """
    index = read_index_document(path)
    blocks, size, keys = index.blocks, index.size, index.keys()
    check_size(path, index.shard, size)
    try:
        wanted = frozenset(suffixes)
        for block in blocks:
            if block["members"].keys() != wanted:
                check_members(path, block["key"], set(block["members"]), suffixes)
            if block["rows"] != 1:
                raise DataError(f"{path}: image {shorten(block['key'])}: {quote(block['rows'])} rows, 1 expected")
        places = [
            (member["offset"], member["length"], member["crc32"])
            for block in blocks
            for member in map(block["members"].__getitem__, suffixes)
        ]
        suffix_numbers = np.array(places)
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise index.refusal() from error
    if suffix_numbers.dtype != np.int64 and len(places):  # something else than whole numbers of 64 bits among them
        raise index.refusal()
    members: Integers = suffix_numbers.astype(np.int64).reshape(len(blocks), len(suffixes), 3)
    _check_places(path, size, keys, members)
    return size, keys, members, _read_labels(path, blocks, "cls" in suffixes)


def _read_labels(path: Path, blocks: list[dict[str, Any]], labelled: bool) -> Integers:
    """The class of each image; -1 of all if they have none."""
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


def _check_places(path: Path, size: int, keys: list[str], members: Integers) -> None:
    """Every member inside its tar, every key once."""
    outside = (members < 0).any(axis=(1, 2)) | (members[:, :, 0] + members[:, :, 1] > size).any(axis=1)
    outside |= (members[:, :, 1:] >= 1 << 32).any(axis=(1, 2))  # columns of 32 bits
    if outside.any():
        raise DataError(
            f"{path}: image {shorten(keys[int(outside.argmax())])}: a member lies outside the tar's {size} bytes"
        )
    if len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise DataError(f"{path}: key {quote(twice)} comes twice; shard the images again")


class CutBlocks(Protocol):
    """Blocks of images, as far as this file knows them.

    Attributes:
        first: [b] number of each block's first image, ascending.
    """

    @property
    def first(self) -> Integers: ...


def stored_part(table: SampleTable, samples: range) -> StoredPart:
    """The tar that holds images, or the part of it that the cache holds (data/stores/tars.py: `reads_parts`).

    Raises:
        DataError: the index is damaged: they lie outside their tar.
    """
    shard = table.shard_of(samples.start)
    tar, size = table.shards[shard], int(table.sizes[shard])
    if not reads_parts(tar, int(table.sizes.sum())):
        return StoredPart(tar, size)
    of_block = slice(samples.start, samples.stop)
    return StoredPart(tar, size, covered(tar, size, table.offsets[of_block], table.lengths[of_block]))


class SampleReader:
    """Reads members of images by `pread`; pickles as its table alone, so a worker opens its own files.

    Not by memory map, as text: an image is read once an epoch and decoded from a copy in any case, one request for the
    whole of it is what a network file system serves best, and a file cut short is a short read, not a signal.

    Args:
        table: the images.
        verify: check each member's crc32. Maps are checked in any case: a damaged one may unpack to other numbers, and
            compared with unpacking it this is nothing.
        keep: tars kept open; at most OPEN_IN_CACHE of those that the cache cannot hold all.
        blocks: of the images: the cache may hold single ones. None: it holds whole tars.
    """

    def __init__(self, table: SampleTable, *, verify: bool, keep: int = 128, blocks: CutBlocks | None = None) -> None:
        self.table = table
        self._blocks = blocks
        self._verify = verify
        self._keep = keep
        self._limit = 0
        self._store: TarStore | None = None
        self._files: OrderedDict[StoredPart, int] = OrderedDict()
        self._fetched_again: set[StoredPart] = set()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": OrderedDict(), "_limit": 0, "_store": None}

    def __del__(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def members(self, sample: int) -> list[bytearray]:
        """The members of an image, in the order of the table's suffixes.

        Raises:
            DataError: the tar is not there or is shorter than at the start, or a checksum differs; also after a cached
                copy was fetched again.
        """
        stored = self._stored_part(sample)
        try:
            return self._read(stored, sample)
        except DataError:
            if not self._drop_cached(stored):
                raise
            return self._read(stored, sample)

    def _drop_cached(self, stored: StoredPart) -> bool:
        """Drop the cached copy of a tar, once in a process; `False` if nothing was dropped."""
        if stored in self._fetched_again or stored not in self._files:
            return False
        self._fetched_again.add(stored)
        descriptor = self._files.pop(stored)
        try:
            return drop_cached(stored, os.fstat(descriptor).st_ino)
        finally:
            os.close(descriptor)

    def _read(self, stored: StoredPart, sample: int) -> list[bytearray]:
        table = self.table
        shard = table.shard_of(sample)
        descriptor, start = self._open(stored), 0 if stored.part is None else stored.part.start
        contents = []
        for position, suffix in enumerate(table.suffixes):
            offset, length = int(table.offsets[sample, position]), int(table.lengths[sample, position])
            if offset < 0 or offset + length > int(table.sizes[shard]):  # a binary index is not read as a whole
                where = self._where(shard, sample, suffix)
                raise DataError(f"{where}: the index is damaged: the member lies outside the tar")
            content = bytearray(length)
            try:
                count = os.preadv(descriptor, [content], offset - start)
            except OSError as error:
                raise DataError(f"{self._where(shard, sample, suffix)}: cannot be read ({error.strerror})") from error
            if count != len(content):
                raise DataError(f"{self._where(shard, sample, suffix)}: {count} bytes found, {len(content)} expected")
            checked = self._verify or suffix not in (IMAGE, CLASS)
            if checked and zlib.crc32(content) != int(table.checksums[sample, position]):
                raise DataError(f"{self._where(shard, sample, suffix)}: checksum differs from the index")
            contents.append(content)
        return contents

    def _where(self, shard: int, sample: int, suffix: str) -> str:
        table = self.table
        return f"{table.shards[shard]}: image {sample - int(table.starts[shard])}, .{suffix}"

    def _stored_part(self, sample: int) -> StoredPart:
        """The tar, or the part of it, that holds an image."""
        if not self._limit:
            self._choose()
        if self._blocks is None:
            shard = self.table.shard_of(sample)
            return StoredPart(self.table.shards[shard], int(self.table.sizes[shard]))
        first = self._blocks.first
        number = int(np.searchsorted(first, sample, side="right"))
        end = int(first[number]) if number < len(first) else self.table.rows
        return stored_part(self.table, range(int(first[number - 1]), end))

    def _open(self, stored: StoredPart) -> int:
        """A descriptor of the file that holds a tar, or a part of it."""
        if stored in self._files:
            self._files.move_to_end(stored)
            return self._files[stored]
        try:
            self._files[stored] = tar_descriptor(self._store, *stored)
        except OSError as error:
            raise DataError(f"{stored.tar}: cannot be opened ({error.strerror})") from error
        if len(self._files) > self._limit:
            os.close(self._files.popitem(last=False)[1])
        return self._files[stored]

    def _choose(self) -> None:
        """Once, when the first image is read: who opens the files, how many are kept open, and whether of tars or of
        blocks."""
        path, total = self.table.shards[0], int(self.table.sizes.sum())
        self._store = store = find_store(path.parent)
        held = store is None or not 0 < store.room() < total
        self._limit = self._keep if held else min(self._keep, OPEN_IN_CACHE)
        if not any(reads_parts(tar, total) for tar in (path, self.table.shards[len(self.table.shards) - 1])):
            self._blocks = None


def read_aligned(directory: Path, maps: StoredMaps, images: SampleTable, rows_per_block: int) -> SampleTable:
    """Read the indexes of the tars in a modality's own directory.

    Args:
        directory: of the data set.
        maps: they lie in `directory / maps.directory`.
        images: the data set's images.
        rows_per_block: that a binary index must be of.

    Raises:
        DataError: a tar, a member or a key is missing or another than beside the image.
    """
    advice = f"make the {maps.name} maps again (trp-scale pseudo-label), or copy {maps.directory} again"
    suffixes = (maps.suffix,)
    try:
        shards = [path.name for path in images.shards]
        table = read_samples(directory / maps.directory, shards, suffixes, suffixes, rows_per_block)
    except DataError as error:
        raise DataError(f"{maps.name} maps beside the images: {error}; {advice}") from error
    for images_tar, maps_tar, ours, theirs in zip(
        images.shards, table.shards, images.key_digests, table.key_digests, strict=True
    ):
        if ours != theirs:
            raise DataError(f"{first_difference(images_tar, maps_tar)}; {advice}")
    return table


def first_difference(images: Path, maps: Path) -> str:
    """The first place at which two tars have different keys, by their indexes; "" if there is none."""
    keys = ([block.key for block in read_index(path).blocks] for path in (images, maps))
    for position, (ours, theirs) in enumerate(zip_longest(*keys)):
        if ours != theirs:
            difference = "no more maps" if theirs is None else f"a map of {shorten(theirs)}"
            expected = "no more images" if ours is None else f"image {shorten(ours)}"
            return f"{maps}: place {position}: {difference} found, {images} has {expected} there"
    return ""
