"""One index for all tars of a directory: numbers in a file that is mapped, not read.

DIRECTORY/index.bin, beside the tars and their JSON indexes, which it is made from:

    64 bytes     magic, format, place, length and hash of the description
    samples      [n] records: offset of each member, class, length and crc32 of each member
    identities   [b] uint64, of each block that order and split see
    rows         [b] int32, of each block
    first        [b] int64, number of each block's first sample
    keys         text only: the blocks' keys, joined
    row_source   optional: [rows] int32, number of each row's source or group
    segments     optional: [rows] int32, packed segments of each row
    segment_ends optional: [sum of segments] int32, end of each segment in its row
    description  JSON: the tars with their sizes, the members' suffixes, hashes, and where each array lies

A JSON index takes 249 bytes and 5 microseconds an image in each process: 100 GB and half an hour for 400 M images. Of
this file a process reads the description, and the kernel keeps one copy of what is used of the rest for all processes
of a machine. The order is the same with and without it: the hash of a `SampleTable`, which checkpoints hold, is
computed from the JSON and stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt

from trp_scale.config.json_files import LARGEST_INDEX, parse_json
from trp_scale.config.schema import Fields, FileName, Positive, Whole, is_plain_name
from trp_scale.data.index import BINARY_INDEX, index_path
from trp_scale.data.stores.tars import TarStore
from trp_scale.errors import DataError, quote
from trp_scale.storage.files import atomic_write

NAME = BINARY_INDEX

BINARY_FORMAT = 1

_MAGIC = b"TRPINDEX"
_START = struct.Struct("<8sQQQ32s")
_CHUNK = 1 << 22
_TAR = tuple[FileName, Whole, Whole, str, str]
"""In the description: name, size, size of its JSON index, hash of that one's end, hash of its keys."""

_KINDS: dict[str, np.dtype[Any]] = {
    "identities": np.dtype("<u8"),
    "rows": np.dtype("<i4"),
    "first": np.dtype("<i8"),
    "keys": np.dtype("|u1"),
    "row_source": np.dtype("<i4"),
    "segments": np.dtype("<i4"),
    "segment_ends": np.dtype("<i4"),
}
"""Types of the arrays beside the samples."""
_END = 4096


@dataclass(frozen=True, kw_only=True)
class _StoredArray:
    """Position and type of an array in the file."""

    dtype: str
    length: Whole
    offset: Whole
    digest: str


@dataclass(frozen=True, kw_only=True)
class TarColumns:
    """Columns of the JSON index of one tar.

    Attributes:
        name: of the tar.
        size: its bytes.
        keys: of the samples, in stored order.
        rows: [n] rows of each sample.
        members: [n, M, 3] offset, length and crc32 of each member.
        labels: [n] class of each image; -1 where there is none.
    """

    name: str
    size: int
    keys: list[str]
    rows: npt.NDArray[np.int64]
    members: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    def key_digest(self) -> bytes:
        """Hash of the keys, in their order."""
        return hashlib.blake2b("\n".join(self.keys).encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class OrderBlocks:
    """Blocks as order and split see them, in stored order: samples of text; of images, consecutive ones of a tar.

    Single images would do for a shuffle; blocks keep reads within few shards at a time (data/plan.py).

    Attributes:
        keys: [b] of text, the sample's key; of images "SHARD/FIRST", see `BlockNames`.
        identities: [b] uint64, `hashing.name_hash` of the key.
        rows: [b] rows of each block.
        first: [b] number of each block's first sample.
        index: the binary index whose mapped file the arrays are; None: they were read from the JSON indexes.
    """

    keys: Sequence[str]
    identities: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    index: BinaryIndex | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        return super().__reduce__() if self.index is None else (BinaryIndex.blocks, (self.index,))


def record_type(members: int) -> np.dtype[Any]:
    """Return the dtype of a sample with this number of members; its size is a multiple of each number's, so that
    columns of it are ordinary arrays."""
    return np.dtype(
        [
            ("offset", "<i8", (members,)),
            ("label", "<i8"),
            ("length", "<u4", (members,)),
            ("checksum", "<u4", (members,)),
        ]
    )


class IndexWriter:
    """Writes the index of a directory, one tar after another; it appears under its name when it is whole."""

    def __init__(self, directory: Path, stream: IO[bytes], suffixes: Sequence[str]) -> None:
        self._directory, self._stream = directory, stream
        self._record = record_type(len(suffixes))
        self._document: dict[str, Any] = {"suffixes": list(suffixes), "arrays": {}}
        self._tars: list[list[object]] = []
        self._counts: list[int] = []
        self._highest_label = -1
        self._digest = hashlib.blake2b(digest_size=16)
        stream.write(bytes(_START.size))

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[tars] samples so far."""
        return np.array(self._counts, dtype=np.int64)

    def add(self, tar: TarColumns) -> None:
        """Append the samples of one tar.

        Raises:
            DataError: a member of 4 GB or more.
        """
        if (tar.members[:, :, 1] >= 1 << 32).any():
            raise DataError(f"{self._directory / tar.name}: a member of 4 GB or more; {NAME} holds smaller ones only")
        records = np.empty(len(tar.members), dtype=self._record)
        records["offset"], records["label"] = tar.members[:, :, 0], tar.labels
        records["length"], records["checksum"] = tar.members[:, :, 1], tar.members[:, :, 2]
        content = records.tobytes()
        self._digest.update(content)
        self._stream.write(content)
        beside = index_path(self._directory / tar.name)
        self._tars.append([tar.name, tar.size, beside.stat().st_size, _end_digest(beside), tar.key_digest().hex()])
        self._counts.append(len(records))
        self._highest_label = max(self._highest_label, int(tar.labels.max(initial=-1)))

    def finish(
        self,
        blocks: OrderBlocks,
        *,
        digest: str,
        rows_per_block: int | None,
        row_columns: Mapping[str, npt.NDArray[np.int32]] = MappingProxyType({}),
    ) -> None:
        """Write the blocks and the description.

        Args:
            blocks: of all tars.
            digest: of the table that the JSON indexes give.
            rows_per_block: images of a block; None: each sample is a block.
            row_columns: optional arrays by name: row_source, segments, segment_ends.
        """
        self._describe("samples", self._record.str, sum(self._counts), _START.size, self._digest.hexdigest())
        self._append("identities", blocks.identities)
        self._append("rows", blocks.rows.astype(np.int32))
        self._append("first", blocks.first)
        if rows_per_block is None:
            self._append("keys", np.frombuffer("\n".join(blocks.keys).encode(), dtype=np.uint8))
        for name, column in row_columns.items():
            self._append(name, column.astype(_KINDS[name]))
        document = {
            **self._document,
            "digest": digest,
            "highest_label": self._highest_label,
            "rows_per_block": rows_per_block,
            "tars": self._tars,
            "counts": self._counts,
        }
        description = json.dumps(document, sort_keys=True).encode()
        offset = self._stream.tell()
        self._stream.write(description)
        self._stream.seek(0)
        hashed = hashlib.blake2b(description, digest_size=32).digest()
        self._stream.write(_START.pack(_MAGIC, BINARY_FORMAT, offset, len(description), hashed))

    def _append(self, name: str, array: npt.NDArray[Any]) -> None:
        self._stream.write(bytes(-self._stream.tell() % 64))
        content = np.ascontiguousarray(array)
        digest = hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()
        self._describe(name, content.dtype.str, len(content), self._stream.tell(), digest)
        self._stream.write(content.tobytes())

    def _describe(self, name: str, dtype: str, length: int, offset: int, digest: str) -> None:
        self._document["arrays"][name] = {"dtype": dtype, "length": length, "offset": offset, "digest": digest}


@contextmanager
def new_index(directory: Path, suffixes: Sequence[str]) -> Iterator[IndexWriter]:
    """Context with a writer of the index of `directory`."""
    with atomic_write(directory / NAME) as stream:
        yield IndexWriter(directory, stream, suffixes)


class BinaryIndex:
    """An opened index; pickles as its path and hash, so a worker maps the file itself.

    Attributes:
        tars: file names.
        paths: of the tars.
        sizes: [tars] bytes.
        counts: [tars] samples.
        starts: [tars + 1] number of each tar's first sample; the last entry is the number of all.
        suffixes: of each sample's members, in the columns' order.
        digest: of the table that the JSON indexes give.
        key_digests: of each tar's keys.
        highest_label: largest class; -1 without classes.
        rows_per_block: images of a block; None: each sample is a block.
        samples: [n] records (`record_type`).

    Raises:
        DataError: the file cannot be read, is damaged, of another format, or of another length than it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields, self.hash = self._description()
        tars = fields.take("tars", list[_TAR])
        self.tars: list[str] = [tar[0] for tar in tars]
        self.sizes = np.array([tar[1] for tar in tars], dtype=np.int64)
        self._beside: list[tuple[int, str]] = [(tar[2], tar[3]) for tar in tars]
        self.paths = TarPaths(path.parent, self.tars)
        self.key_digests = [_from_hex(tar[4], fields) for tar in tars]
        self.counts = np.array(fields.take("counts", list[Whole]), dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)
        self.suffixes: tuple[str, ...] = tuple(fields.texts("suffixes"))
        self.digest = fields.text("digest")
        self.highest_label = fields.whole("highest_label", least=-1)
        self.rows_per_block: int | None = fields.take("rows_per_block", Positive | None)
        self._arrays: dict[str, _StoredArray] = fields.take("arrays", dict[str, _StoredArray])
        self.samples: npt.NDArray[Any] = self.array("samples", record_type(len(self.suffixes)))
        if len(self.counts) != len(self.tars) or sum(self.counts.tolist()) != len(self.samples):
            raise fields.refusal(
                f"counts of {len(self.counts)} tars with {sum(self.counts.tolist())} samples found, "
                f"{len(self.tars)} tars and {len(self.samples)} samples expected"
            )
        self._check_blocks(fields)

    def __reduce__(self) -> tuple[object, tuple[Path, bytes]]:
        return _reopen, (self.path, self.hash)

    def _check_blocks(self, fields: Fields) -> None:
        """Check that each table has one entry per block."""
        lengths = {
            name: array.length for name, array in self._arrays.items() if name in ("identities", "rows", "first")
        }
        if set(lengths) != {"identities", "rows", "first"} or len(set(lengths.values())) > 1:
            raise fields.refusal(
                f"arrays of {quote(lengths)} blocks found, identities, rows and first of each expected"
            )

    def _description(self) -> tuple[Fields, bytes]:
        advice = self._advice
        try:
            with self.path.open("rb") as stream:
                start = stream.read(_START.size)
                if len(start) < _START.size or start[:8] != _MAGIC:
                    raise DataError(f"{self.path}: no binary index; {advice}")
                _, form, start_, length, hashed = _START.unpack(start)
                if form != BINARY_FORMAT:
                    raise DataError(f"{self.path}: format {form} found, {BINARY_FORMAT} expected; {advice}")
                actual_size = os.fstat(stream.fileno()).st_size
                if actual_size != start_ + length or length > LARGEST_INDEX:
                    raise DataError(f"{self.path}: {actual_size} bytes found, {start_ + length} expected; {advice}")
                stream.seek(start_)
                description = stream.read(length)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error
        if hashlib.blake2b(description, digest_size=32).digest() != hashed:
            raise DataError(f"{self.path}: its description is damaged; {advice}")
        where = f"{self.path}: its description"
        return Fields(parse_json(description, where, DataError), where, DataError, advice), hashed

    def array(self, name: str, dtype: np.dtype[Any] | None = None) -> npt.NDArray[Any]:
        """One of the arrays, read-only, over the mapped file.

        Raises:
            DataError: there is none, it is of another type, or lies outside the file.
        """
        array = self._arrays.get(name)
        kind = _KINDS.get(name) if dtype is None else dtype
        if array is None or kind is None or (dtype is None and array.dtype != kind.str):
            raise DataError(f"{self.path}: array {name} is missing or of another type; {self._advice}")
        if array.offset + array.length * kind.itemsize > self.path.stat().st_size:
            raise DataError(f"{self.path}: array {name} lies outside the file; {self._advice}")
        if not array.length:
            return np.empty(0, dtype=kind)
        return np.memmap(self.path, dtype=kind, mode="r", offset=array.offset, shape=(array.length,))

    def row_column(self, name: str) -> npt.NDArray[np.int32] | None:
        """One of the optional arrays, such as `row_source`; `None` if the data set has none.

        Raises:
            DataError: it is of another type, or lies outside the file.
        """
        return self.array(name) if name in self._arrays else None

    @property
    def _advice(self) -> str:
        return f"make it again: trp-scale index {self.path.parent.parent}"

    @property
    def _stale_advice(self) -> str:
        directory = self.path.parent.parent
        return f"it is older than the data, or the data was copied in part; trp-scale index {directory} makes it again"

    def blocks(self) -> OrderBlocks:
        """Blocks for order and split.

        Raises:
            DataError: the keys of text are damaged.
        """
        first = self.array("first")
        keys = self._keys() if self.rows_per_block is None else BlockNames(self.paths, self.starts, first)
        return OrderBlocks(
            keys=keys, identities=self.array("identities"), rows=self.array("rows"), first=first, index=self
        )

    def _keys(self) -> list[str]:
        try:
            keys = self.array("keys").tobytes().decode().split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: the keys are damaged; {self._advice}") from error
        if len(keys) != len(self.samples):
            raise DataError(f"{self.path}: {len(keys)} keys found for {len(self.samples)} blocks")
        return keys

    def check(
        self, shards: Sequence[str], suffixes: Sequence[str], rows_per_block: int | None, store: TarStore
    ) -> None:
        """Compare with dataset.json and, on the first rank of each machine, with the tars and the JSON indexes: each
        machine asks a shared file system for 10,000 tars once, not each rank.

        Raises:
            DataError: the index is of other tars, members, sizes or blocks.
        """
        directory = self.path.parent
        advice = self._stale_advice
        for name in shards:
            if not is_plain_name(name):
                raise DataError(f"{directory}: shard {quote(name)} is not a plain file name")
        if list(shards) != self.tars:
            raise DataError(f"{self.path}: of other tars than dataset.json lists; {advice}")
        for what, here, asked in (
            ("members", self.suffixes, tuple(suffixes)),
            ("images of a block", self.rows_per_block, rows_per_block),
        ):
            if here != asked:
                raise DataError(f"{self.path}: {what} {quote(here)} there, {quote(asked)} in dataset.json; {advice}")
        if not first_rank_here():
            return
        modified = self.path.stat().st_mtime_ns
        for tar, size, (json_size, json_end) in zip(self.paths, self.sizes.tolist(), self._beside, strict=True):
            if store.uses_cache:  # the JSON indexes may be elsewhere
                self._compare_size(tar, store.size(tar), size)
                continue
            beside = index_path(tar)
            statuses = _status(tar), _status(beside)
            self._compare_size(tar, statuses[0].st_size, size)
            self._compare_size(beside, statuses[1].st_size, json_size)
            if max(status.st_mtime_ns for status in statuses) > modified and _end_digest(beside) != json_end:
                raise DataError(f"{beside}: newer than {NAME}, and other content; {advice}")

    def _compare_size(self, path: Path, size: int | None, expected: int) -> None:
        if size not in (None, expected):
            raise DataError(f"{path}: {size} bytes found, {NAME} was made of {expected} bytes; {self._stale_advice}")

    def verify(self) -> None:
        """Read all arrays.

        Raises:
            DataError: one differs from its hash.
        """
        for name, stored in self._arrays.items():
            digest = hashlib.blake2b(digest_size=16)
            array = self.array(name, self.samples.dtype if name == "samples" else None)
            for first in range(0, len(array), _CHUNK):
                digest.update(array[first : first + _CHUNK].tobytes())
            if digest.hexdigest() != stored.digest:
                raise DataError(f"{self.path}: {quote(name)} are damaged; {self._advice}")


def _from_hex(text: str, fields: Fields) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise fields.refusal(f"{quote(text)} found, a hash expected") from error


def first_rank_here() -> bool:
    """Whether this process is the first rank of its machine; a lenient reading, as not every process is a rank."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _end_digest(path: Path) -> str:
    """Hash of a file's last bytes; those of a JSON index have the checksums of its tar's last samples."""
    with path.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return hashlib.blake2b(stream.read(), digest_size=8).hexdigest()


def _reopen(path: Path, hashed: bytes) -> BinaryIndex:
    index = BinaryIndex(path)
    if index.hash != hashed:
        raise DataError(f"{path}: was made again while the run reads it; start the run again")
    return index


def find_index(directory: Path) -> BinaryIndex | None:
    """The binary index of the tars in `directory`, or None where there is none: then the JSON indexes are read.

    Raises:
        DataError: there is one that cannot be used.
    """
    path = directory / NAME
    return BinaryIndex(path) if path.exists() else None


class TarPaths(Sequence[Path]):
    """Paths of tars, made when asked for: 10,000 of them take 10 MB in each process."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory, self._names = directory, names

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        if isinstance(index, slice):
            return [self._directory / name for name in self._names[index]]
        return self._directory / self._names[index]


class BlockNames(Sequence[str]):
    """ "SHARD/FIRST" of each block of images: the tar's name without its suffix, and the place of the block's first
    image in it. Made when asked for: 400 M images have 6 M blocks.

    Args:
        tars: their paths.
        starts: [tars + 1] number of the first image of each tar.
        first: [b] number of each block's first image.
    """

    def __init__(self, tars: Sequence[Path], starts: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> None:
        self._tars, self._starts, self._first = tars, starts, first

    def __len__(self) -> int:
        return len(self._first)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        first = int(self._first[index])
        tar = int(np.searchsorted(self._starts, first, side="right")) - 1
        if not 0 <= tar < len(self._tars):
            raise DataError(f"{self._tars[0].parent}: {NAME} is damaged: block {index} begins at image {first}")
        return f"{self._tars[tar].stem}/{first - int(self._starts[tar])}"

    def __iter__(self) -> Iterator[str]:
        tars = (np.searchsorted(self._starts, self._first, side="right") - 1).tolist()
        for tar, first in zip(tars, self._first.tolist(), strict=True):
            yield f"{self._tars[tar].stem}/{first - int(self._starts[tar])}"
