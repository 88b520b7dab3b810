"""Binary index of all tars of a directory, read through a memory map.

DIRECTORY/index.bin is written from the JSON indexes of the tars:

    64 bytes     magic, format, offset, length and hash of the description
    samples      [n] records: offset of each member, class, length and crc32 of each member
    identities   [b] uint64, identity of each block
    rows         [b] int32, rows of each block
    first        [b] int64, number of each block's first sample
    keys         text only: the blocks' keys, joined
    description  JSON: tars and their sizes, suffixes of the members, hashes, offset of each array

Each process needs 249 bytes and 5 microseconds an image for the JSON indexes: 100 GB and half an hour for 400 M images.
From this file a process reads the description only. The kernel keeps one copy of the other pages for all processes of a
machine. The order of the data does not depend on this file: it stores the hash of the `SampleTable` that the JSON
indexes give, and checkpoints hold that hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt

from trp_scale.config.files import LARGEST_INDEX, parse_json
from trp_scale.config.schema import Fields, FileName, Positive, Whole
from trp_scale.data.index import BINARY_INDEX, index_path
from trp_scale.data.tars import TarStore
from trp_scale.errors import DataError, quote

NAME = BINARY_INDEX

BINARY_FORMAT = 1

_MAGIC = b"TRPINDEX"
_START = struct.Struct("<8sQQQ32s")
_CHUNK = 1 << 22
_TAR = tuple[FileName, Whole, Whole, str, str]
"""Tar in the description: name, size, size of its JSON index, hash of the index's end, hash of its keys."""

_KINDS: dict[str, np.dtype[Any]] = {
    "identities": np.dtype("<u8"),
    "rows": np.dtype("<i4"),
    "first": np.dtype("<i8"),
    "keys": np.dtype("|u1"),
}
"""Types of all arrays except `samples`."""
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
        name: file name.
        size: bytes.
        keys: keys of the samples, in stored order.
        rows: [n] rows of each sample.
        members: [n, M, 3] offset, length and crc32 of each member.
        labels: [n] class of each image; -1 without classes.
    """

    name: str
    size: int
    keys: list[str]
    rows: npt.NDArray[np.int64]
    members: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    def key_digest(self) -> bytes:
        """Hash of the keys in stored order."""
        return hashlib.blake2b("\n".join(self.keys).encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class OrderBlocks:
    """Blocks of a data set in stored order: single samples of text, or consecutive images of one tar.

    Images form blocks so that a shuffle reads from few shards at a time (data/plan.py).

    Attributes:
        keys: [b] key of the text sample, or "SHARD/FIRST" (`BlockNames`).
        identities: [b] uint64, `hashing.name_hash` of the key.
        rows: [b] rows of each block.
        first: [b] number of each block's first sample.
        index: binary index that maps the arrays; `None` if they come from the JSON indexes.
    """

    keys: Sequence[str]
    identities: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    index: BinaryIndex | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        return super().__reduce__() if self.index is None else (BinaryIndex.blocks, (self.index,))


def record_type(members: int) -> np.dtype[Any]:
    """Return the dtype of a sample; every column is aligned."""
    return np.dtype(
        [
            ("offset", "<i8", (members,)),
            ("label", "<i8"),
            ("length", "<u4", (members,)),
            ("checksum", "<u4", (members,)),
        ]
    )


class IndexWriter:
    """Writes the index of a directory, one tar after another."""

    def __init__(self, directory: Path, stream: IO[bytes], suffixes: Sequence[str]) -> None:
        self._directory, self._stream = directory, stream
        self._record = record_type(len(suffixes))
        self._document: dict[str, Any] = {"suffixes": list(suffixes), "arrays": {}}
        self._tars: list[list[object]] = []
        self._counts: list[int] = []
        self._highest_label = -1
        self._digest = hashlib.blake2b(digest_size=16)
        stream.write(bytes(_START.size))

    def add(self, tar: TarColumns) -> None:
        """Append the samples of one tar.

        Raises:
            DataError: a member has 4 GB or more.
        """
        if (tar.members[:, :, 1] >= 1 << 32).any():
            raise DataError(f"{self._directory / tar.name}: a member has 4 GB or more; {NAME} holds smaller ones only")
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

    def finish(self, blocks: OrderBlocks, *, digest: str, rows_per_block: int | None) -> None:
        """Write the blocks and the description.

        Args:
            blocks: blocks of all tars.
            digest: hash of the table that the JSON indexes give.
            rows_per_block: images of a block; `None` if each sample is a block.
        """
        self._describe("samples", self._record.str, sum(self._counts), _START.size, self._digest.hexdigest())
        self._append("identities", blocks.identities)
        self._append("rows", blocks.rows.astype(np.int32))
        self._append("first", blocks.first)
        if rows_per_block is None:
            self._append("keys", np.frombuffer("\n".join(blocks.keys).encode(), dtype=np.uint8))
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


class BinaryIndex:
    """Opened index. It pickles as path and hash, so that a worker maps the file again.

    Attributes:
        tars: file names.
        paths: paths of the tars.
        sizes: [tars] bytes.
        counts: [tars] samples.
        starts: [tars + 1] number of each tar's first sample; the last entry is the number of all samples.
        suffixes: members of each sample, in the order of the columns.
        digest: hash of the table that the JSON indexes give.
        key_digests: hash of each tar's keys.
        highest_label: largest class; -1 without classes.
        rows_per_block: images of a block; `None` if each sample is a block.
        samples: [n] records (`record_type`).

    Raises:
        DataError: the file cannot be read, is damaged, or has another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields, self.hash = self._description()
        tars = fields.take("tars", list[_TAR])
        self.tars: list[str] = [tar[0] for tar in tars]
        self.sizes = np.array([tar[1] for tar in tars], dtype=np.int64)
        self._beside: list[tuple[int, str]] = [(tar[2], tar[3]) for tar in tars]
        self.paths = [path.parent / name for name in self.tars]
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
        """Check that identities, rows and first have the same length."""
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
                    raise DataError(f"{self.path}: not a binary index; {advice}")
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
            raise DataError(f"{self.path}: the description is damaged; {advice}")
        where = f"{self.path}: description"
        return Fields(parse_json(description, where, DataError), where, DataError, advice), hashed

    def array(self, name: str, dtype: np.dtype[Any] | None = None) -> npt.NDArray[Any]:
        """Map an array, read-only.

        Raises:
            DataError: it is missing, has another type, or extends beyond the file.
        """
        array = self._arrays.get(name)
        kind = _KINDS.get(name) if dtype is None else dtype
        if array is None or kind is None or (dtype is None and array.dtype != kind.str):
            raise DataError(f"{self.path}: array {name} is missing or has another type; {self._advice}")
        if array.offset + array.length * kind.itemsize > self.path.stat().st_size:
            raise DataError(f"{self.path}: array {name} extends beyond the file; {self._advice}")
        if not array.length:
            return np.empty(0, dtype=kind)
        return np.memmap(self.path, dtype=kind, mode="r", offset=array.offset, shape=(array.length,))

    @property
    def _advice(self) -> str:
        return f"write it again: trp-scale index {self.path.parent.parent}"

    @property
    def _stale_advice(self) -> str:
        directory = self.path.parent.parent
        return f"it is older than the data, or the data is incomplete; write it again: trp-scale index {directory}"

    def blocks(self) -> OrderBlocks:
        """Return the blocks for order and split.

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
            raise DataError(f"{self.path}: {len(keys)} keys found, {len(self.samples)} expected")
        return keys

    def check(
        self, shards: Sequence[str], suffixes: Sequence[str], rows_per_block: int | None, store: TarStore
    ) -> None:
        """Compare with dataset.json; on the first rank of each machine also with the tars and the JSON indexes.

        The other ranks skip the latter: 10,000 tars on a shared file system are looked up once per machine.

        Raises:
            DataError: tars, members, sizes or blocks differ.
        """
        advice = self._stale_advice
        if list(shards) != self.tars:
            raise DataError(f"{self.path}: its tars differ from those of dataset.json; {advice}")
        for what, here, asked in (
            ("members", self.suffixes, tuple(suffixes)),
            ("images of a block", self.rows_per_block, rows_per_block),
        ):
            if here != asked:
                raise DataError(f"{self.path}: {what} {quote(here)} found, {quote(asked)} in dataset.json; {advice}")
        if not first_rank_here():
            return
        modified = self.path.stat().st_mtime_ns
        for tar, size, (json_size, json_end) in zip(self.paths, self.sizes.tolist(), self._beside, strict=True):
            if store.uses_cache:  # the JSON indexes may be in another directory
                self._compare_size(tar, store.size(tar), size)
                continue
            beside = index_path(tar)
            statuses = _status(tar), _status(beside)
            self._compare_size(tar, statuses[0].st_size, size)
            self._compare_size(beside, statuses[1].st_size, json_size)
            if max(status.st_mtime_ns for status in statuses) > modified and _end_digest(beside) != json_end:
                raise DataError(f"{beside}: newer than {NAME}, with other content; {advice}")

    def _compare_size(self, path: Path, size: int | None, expected: int) -> None:
        if size not in (None, expected):
            raise DataError(f"{path}: {size} bytes found, {NAME} expects {expected} bytes; {self._stale_advice}")

    def verify(self) -> None:
        """Compare all arrays with their hashes.

        Raises:
            DataError: an array is damaged.
        """
        for name, stored in self._arrays.items():
            digest = hashlib.blake2b(digest_size=16)
            array = self.array(name, self.samples.dtype if name == "samples" else None)
            for first in range(0, len(array), _CHUNK):
                digest.update(array[first : first + _CHUNK].tobytes())
            if digest.hexdigest() != stored.digest:
                raise DataError(f"{self.path}: array {quote(name)} is damaged; {self._advice}")


def _from_hex(text: str, fields: Fields) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise fields.refusal(f"{quote(text)} found, a hash expected") from error


def first_rank_here() -> bool:
    """Whether this process is the first rank of its machine; also `True` for a process that is not a rank."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _end_digest(path: Path) -> str:
    """Hash of a file's last bytes; a JSON index ends with the checksums of its tar's last samples."""
    with path.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return hashlib.blake2b(stream.read(), digest_size=8).hexdigest()


def _reopen(path: Path, hashed: bytes) -> BinaryIndex:
    index = BinaryIndex(path)
    if index.hash != hashed:
        raise DataError(f"{path}: changed while the run reads it; start the run again")
    return index


def find_index(directory: Path) -> BinaryIndex | None:
    """Open the binary index of the tars in `directory`; `None` if none exists.

    Raises:
        DataError: the index is unusable.
    """
    path = directory / NAME
    return BinaryIndex(path) if path.exists() else None


class BlockNames(Sequence[str]):
    """ "SHARD/FIRST" of each block of images: tar name without suffix, and index of its first image in the tar.

    The names are created on access: 400 M images have 6 M blocks.

    Args:
        tars: paths.
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
            raise DataError(f"{self._tars[0].parent}: {NAME} is damaged: block {index} starts at image {first}")
        return f"{self._tars[tar].stem}/{first - int(self._starts[tar])}"

    def __iter__(self) -> Iterator[str]:
        tars = (np.searchsorted(self._starts, self._first, side="right") - 1).tolist()
        for tar, first in zip(tars, self._first.tolist(), strict=True):
            yield f"{self._tars[tar].stem}/{first - int(self._starts[tar])}"
