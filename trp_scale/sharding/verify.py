"""Check every byte of a data set: tar headers, contents, padding, and what the members hold."""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from trp_scale.config.schema import Fields, Whole
from trp_scale.data.binary_index import find_index
from trp_scale.data.images.maps import second_directories
from trp_scale.data.index import Block, ShardIndex, read_fields, read_index
from trp_scale.data.stores.tars import find_external_tars
from trp_scale.errors import DataError, error_text, quote, shorten
from trp_scale.sharding.images import stored as images
from trp_scale.sharding.images.index_tars import member_choice, verify_tar
from trp_scale.sharding.text import stored as text

_TAR_UNIT = 512


class Kind(Protocol):
    """Checks of one kind of data set: a module with these two functions, which raise DataError."""

    def check_members(self, shard: Path, block: Block, dataset: dict[str, Any]) -> None: ...

    def check_contents(
        self, where: str, places: dict[str, str], contents: dict[str, bytes], block: Block, dataset: dict[str, Any]
    ) -> None: ...


KINDS: dict[str, Kind] = {"text": text, "image": images}
"""By "kind" in dataset.json."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Counts of verified data. `bytes`: of all tars, also of those of maps beside the images'."""

    shards: int
    blocks: int
    rows: int
    bytes: int


def verify_dataset(directory: Path) -> Verified:
    """Check a data set from dataset.json down to the last byte of its tars.

    Raises:
        DataError: the first thing that is wrong, with shard, block, member and bytes a-b (both inclusive).
    """
    fields = read_fields(directory / "dataset.json")
    kind, dataset = KINDS[fields.take("kind", Literal["text", "image"])], kind_fields(fields)
    second = second_directories(directory / "dataset.json", dataset)
    _refuse_unlisted(directory / "shards", dataset)
    for folder in ("shards", *second):
        if (binary := find_index(directory / folder)) is not None:
            binary.verify()
    entries = blocks = rows = size = 0
    seen: set[str] = set()
    external = find_external_tars(directory / "shards")
    for name in dataset["shards"]:
        shard = directory / "shards" / name
        index = read_index(shard)
        if external is None:
            _verify_shard(shard, index, dataset, kind)
        else:
            verify_tar(shard, external.where(shard), member_choice(shard), images.check_decodes)
        for block in index.blocks:
            if external is None and block.key in seen:  # tars of others may each count from 0
                raise DataError(f"{shard}: block {shorten(block.key)}: the key is used twice in the data set")
            seen.add(block.key)
        entries += len(index.blocks)
        blocks += -(-len(index.blocks) // dataset.get("rows_per_block", 1)) if kind is images else len(index.blocks)
        rows += sum(block.rows for block in index.blocks)
        size += index.size
    for what, count in (("blocks", entries), ("rows", rows)):
        if dataset.get(what, count) != count:
            raise DataError(f"{directory / 'dataset.json'}: {quote(dataset[what])} {what} written there, {count} found")
    for name, modality in second.items():
        _refuse_unlisted(directory / name, dataset)
        for shard in dataset["shards"]:
            size += _verify_maps(directory / "shards" / shard, directory / name / shard, modality.suffix, dataset)
    return Verified(shards=len(dataset["shards"]), blocks=blocks, rows=rows, bytes=size)


def kind_fields(fields: Fields) -> dict[str, Any]:
    """dataset.json, with those fields of their types that checking a block asks for.

    Raises:
        DataError: one is missing or of another type.
    """
    fields.file_names("shards")
    if fields.document["kind"] == "text":
        fields.take("token_dtype", Literal["uint16", "uint32"])
        fields.whole("row_length", least=1)
        fields.whole("vocab_size")
        if "pad" not in fields.take("special_tokens", dict[str, Whole]):
            raise fields.refusal("special_tokens has no 'pad'")
    else:
        fields.texts("suffixes")
        fields.take("classes", list[str] | None, None)
    return {"classes": None, **fields.document}


def _refuse_unlisted(directory: Path, dataset: dict[str, Any]) -> None:
    listed = set(dataset["shards"])
    for path in sorted(directory.glob("*.tar")):
        if path.name not in listed:
            raise DataError(f"{path}: not listed in dataset.json")


def _verify_maps(images_tar: Path, maps_tar: Path, suffix: str, dataset: dict[str, Any]) -> int:
    """Check a tar of maps by itself and beside its images' tar; returns its size in bytes."""
    index = read_index(maps_tar)
    _verify_shard(maps_tar, index, {**dataset, "suffixes": [suffix]}, images)
    images.check_aligned(images_tar, maps_tar, suffix)
    return index.size


def _verify_shard(shard: Path, index: ShardIndex, dataset: dict[str, Any], kind: Kind) -> None:
    """Walk through the tar from its first byte to its last, beside the index."""
    if not shard.exists():
        raise DataError(f"{shard}: not found")
    size = shard.stat().st_size
    if index.shard != shard.name or index.size != size:
        raise DataError(f"{shard}: {size} bytes found, its index says {index.size} bytes of {shorten(index.shard)}")
    for block in index.blocks:
        kind.check_members(shard, block, dataset)
    places = sorted(
        (member.offset, suffix, block) for block in index.blocks for suffix, member in block.members.items()
    )
    position = 0
    with shard.open("rb") as stream:
        contents: dict[str, bytes] = {}
        named: dict[str, str] = {}
        for offset, suffix, block in places:
            where = f"{shard}: block {shorten(block.key)}, member {suffix}"
            if offset != position + _TAR_UNIT:
                raise DataError(f"{where}: the index says it begins at byte {offset}, not {position + _TAR_UNIT}")
            _verify_header(where, stream.read(_TAR_UNIT), position, block, suffix)
            named[suffix], contents[suffix] = _verify_content(where, stream, block, suffix)
            position = stream.tell()
            if len(contents) == len(block.members):
                kind.check_contents(f"{shard}: block {block.key}", named, contents, block, dataset)
                contents = {}
        _verify_zeros(f"{shard}: end of the tar", stream.read(), position)


def _verify_header(where: str, header: bytes, position: int, block: Block, suffix: str) -> None:
    """The tar header (with its own checksum) must name the member and its length."""
    location = f"{where}, bytes {position}-{position + _TAR_UNIT - 1}"
    try:
        entry = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise DataError(f"{location}: damaged tar header ({error_text(error)})") from error
    if header[148:156] != f"{entry.chksum:06o}\0 ".encode():  # the one field that its own checksum does not cover
        raise DataError(f"{location}: damaged tar header (checksum field)")
    length = block.members[suffix].length
    if (entry.name, entry.size) != (f"{block.key}.{suffix}", length):
        raise DataError(
            f"{location}: the tar holds {shorten(entry.name)} of {entry.size} bytes, the index says {length} bytes"
        )


def _verify_content(where: str, stream: IO[bytes], block: Block, suffix: str) -> tuple[str, bytes]:
    """The place of a member, for messages, and its content."""
    member = block.members[suffix]
    content = stream.read(member.length)
    location = f"{where}, bytes {member.offset}-{member.offset + member.length - 1}"
    checksum = zlib.crc32(content)
    if len(content) != member.length or checksum != member.crc32:
        raise DataError(f"{location}: checksum {checksum:08x} found, {member.crc32:08x} expected; make the shard again")
    _verify_zeros(where, stream.read(-member.length % _TAR_UNIT), member.offset + member.length)
    return location, content


def _verify_zeros(where: str, padding: bytes, position: int) -> None:
    wrong = padding.strip(b"\0")
    if wrong:
        first = position + padding.index(wrong)
        raise DataError(f"{where}, bytes {first}-{first + len(wrong) - 1}: padding that is not zero")
