"""Check every byte of a text data set: tar headers, contents, padding, and what the arrays hold."""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trp_scale.data.groups import GROUP_BITS, GROUPS, OTHER, WORD_START
from trp_scale.data.index import Block, DataError, ShardIndex, read_index, read_json
from trp_scale.data.text.members import check_suffixes, parse_array

_TAR_UNIT = 512


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found to be whole."""

    shards: int
    blocks: int
    rows: int
    bytes: int


def verify_dataset(directory: Path) -> Verified:
    """Check a data set from dataset.json down to the last byte of its tars.

    Raises:
        DataError: the first thing that is wrong, with shard, block, member and bytes a-b (both inclusive).
    """
    dataset = read_json(directory / "dataset.json")
    if dataset.get("kind") != "text":
        raise DataError(f"{directory / 'dataset.json'}: kind {dataset.get('kind')!r} found, 'text' expected")
    listed = set(dataset["shards"])
    for path in sorted((directory / "shards").glob("*.tar")):
        if path.name not in listed:
            raise DataError(f"{path}: not listed in dataset.json")
    blocks = rows = size = 0
    seen: set[str] = set()
    for name in dataset["shards"]:
        shard = directory / "shards" / name
        index = read_index(shard)
        _verify_shard(shard, index, dataset)
        for block in index.blocks:
            if block.key in seen:
                raise DataError(f"{shard}: block {block.key}: the key is used twice in the data set")
            seen.add(block.key)
        blocks += len(index.blocks)
        rows += sum(block.rows for block in index.blocks)
        size += index.size
    for what, found in (("blocks", blocks), ("rows", rows)):
        if dataset[what] != found:
            raise DataError(f"{directory / 'dataset.json'}: {dataset[what]} {what} written there, {found} found")
    return Verified(shards=len(dataset["shards"]), blocks=blocks, rows=rows, bytes=size)


def _verify_shard(shard: Path, index: ShardIndex, dataset: dict[str, Any]) -> None:
    """Walk through the tar from its first byte to its last, beside the index."""
    if not shard.exists():
        raise DataError(f"{shard}: not found")
    size = shard.stat().st_size
    if index.shard != shard.name or index.size != size:
        raise DataError(f"{shard}: {size} bytes found, its index says {index.size} bytes of {index.shard}")
    for block in index.blocks:
        check_suffixes(shard, block)
    places = sorted(
        (member.offset, suffix, block) for block in index.blocks for suffix, member in block.members.items()
    )
    position = 0
    with shard.open("rb") as stream:
        arrays: dict[str, NDArray[Any]] = {}
        for offset, suffix, block in places:
            where = f"{shard}: block {block.key}, member {suffix}"
            if offset != position + _TAR_UNIT:
                raise DataError(f"{where}: the index says it begins at byte {offset}, not {position + _TAR_UNIT}")
            _verify_header(where, stream.read(_TAR_UNIT), position, block, suffix)
            arrays[suffix] = _verify_content(where, stream, block, suffix)
            position = stream.tell()
            if len(arrays) == len(block.members):
                _verify_rows(f"{shard}: block {block.key}", arrays, block, dataset)
                arrays = {}
        _verify_zeros(f"{shard}: end of the tar", stream.read(), position)


def _verify_header(where: str, header: bytes, position: int, block: Block, suffix: str) -> None:
    """The tar header (with its own checksum) must name the member and its length."""
    place = f"{where}, bytes {position}-{position + _TAR_UNIT - 1}"
    try:
        entry = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except tarfile.HeaderError as error:
        raise DataError(f"{place}: damaged tar header ({error})") from error
    length = block.members[suffix].length
    if (entry.name, entry.size) != (f"{block.key}.{suffix}", length):
        raise DataError(
            f"{place}: the tar holds {entry.name} of {entry.size} bytes there, the index says {length} bytes"
        )


def _verify_content(where: str, stream: IO[bytes], block: Block, suffix: str) -> NDArray[Any]:
    member = block.members[suffix]
    content = stream.read(member.length)
    place = f"{where}, bytes {member.offset}-{member.offset + member.length - 1}"
    found = zlib.crc32(content)
    if len(content) != member.length or found != member.crc32:
        raise DataError(f"{place}: checksum {found:08x} found, {member.crc32:08x} expected; make the shard again")
    _verify_zeros(where, stream.read(-member.length % _TAR_UNIT), member.offset + member.length)
    return parse_array(place, content)


def _verify_zeros(where: str, padding: bytes, position: int) -> None:
    wrong = padding.strip(b"\0")
    if wrong:
        first = position + padding.index(wrong)
        raise DataError(f"{where}, bytes {first}-{first + len(wrong) - 1}: padding that is not zero")


def _verify_rows(where: str, arrays: dict[str, NDArray[Any]], block: Block, dataset: dict[str, Any]) -> None:
    """The arrays must have the form that dataset.json promises."""
    shape = (block.rows, dataset["row_length"])
    for suffix, dtype in (("tokens.npy", dataset["token_dtype"]), ("tags.npy", "uint8"), ("sentences.npy", "uint16")):
        array = arrays[suffix]
        wanted = shape if suffix != "sentences.npy" else (block.rows, max(1, array.shape[-1] if array.ndim else 0))
        if array.dtype != np.dtype(dtype) or array.shape != wanted:
            raise DataError(f"{where}, {suffix}: {array.dtype} {array.shape} found, {dtype} {wanted} expected")
    tokens, tags = arrays["tokens.npy"], arrays["tags.npy"]  # [R, row_length]
    ends = arrays["sentences.npy"].astype(np.int64)  # [R, S]
    lengths = ends[:, -1]
    padding = np.arange(shape[1]) >= lengths[:, None]  # [R, row_length]
    checks = (
        (tokens >= dataset["vocab_size"], f"a piece that is not below vocab_size {dataset['vocab_size']}"),
        ((tags & GROUP_BITS >= len(GROUPS)) | (tags & ~np.uint8(GROUP_BITS | WORD_START) != 0), "a tag of no group"),
        ((lengths < 1) | (lengths > shape[1]), f"a row length outside 1-{shape[1]}"),
        ((ends[:, 0] < 1) | (np.diff(ends, axis=1) < 0).any(axis=1), "sentence ends that do not ascend"),
        (padding & (tokens != dataset["special_tokens"]["pad"]), "a piece behind the end of the row"),
        (padding & (tags != OTHER), "a tag behind the end of the row"),
    )
    for wrong, what in checks:
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            raise DataError(f"{where}, row {row}: {what}")
