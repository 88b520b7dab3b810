"""Verification of every byte of a data set: tar headers, checksums, padding and member contents; and the merge of a
data set that was made in parts."""

from __future__ import annotations

import io
import logging
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from PIL import Image

from trp_scale.config.schema import record
from trp_scale.data.binary_index import find_index
from trp_scale.data.images.dataset import ImageMeta, first_difference, read_image_meta
from trp_scale.data.images.formats import FORMATS, png_size, refuse_too_many_pixels, refuse_too_many_scans
from trp_scale.data.images.maps import CLASS, IMAGE, StoredMaps, map_formats, second_directories, stored_maps
from trp_scale.data.index import (
    Block,
    ShardIndex,
    StoredMember,
    index_path,
    read_fields,
    read_index,
    read_index_document,
    read_json,
)
from trp_scale.data.raw_files import read_dataset
from trp_scale.data.samples import check_members
from trp_scale.data.tar_reader import parse_npy
from trp_scale.data.tars import ExternalTars, StoredPart, find_external_tars
from trp_scale.data.text.dataset import (
    GROUP_BITS,
    GROUPS,
    OTHER,
    PACKED_FORMAT,
    SUFFIXES,
    WORD_START,
    TextMeta,
    read_text_meta,
)
from trp_scale.errors import DataError, error_text, quote, shorten
from trp_scale.sharding.images.index_tars import TARS, MemberChoice, read_tar, stored_tars
from trp_scale.sharding.images.shard import IMAGES
from trp_scale.sharding.job import DataKind, finish_dataset
from trp_scale.sharding.parts import Part, all_parts
from trp_scale.sharding.pseudo_labels.directory import label_kind
from trp_scale.sharding.text.shard import TEXT
from trp_scale.storage.files import only_run

_TAR_UNIT = 512

CheckContents = Callable[[str, dict[str, str], dict[str, bytes], Block], None]
"""Raises DataError for a wrong sample. Arguments: location, location and content of each member, index entry."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Counts of verified data. `bytes` includes the tars of maps."""

    shards: int
    blocks: int
    rows: int
    bytes: int


def verify_dataset(directory: Path) -> Verified:
    """Check a data set from dataset.json down to the last byte of its tars.

    Raises:
        DataError: the first error, with shard, block, member and bytes a-b (both inclusive).
    """
    path = directory / "dataset.json"
    kind = read_fields(path).take("kind", Literal["text", "image"])
    fields = read_dataset(directory, kind, "shard the data again", newest=PACKED_FORMAT)
    dataset, shards = fields.document, fields.file_names("shards")
    suffixes: tuple[str, ...] = SUFFIXES
    rows_per_block = 1
    check: CheckContents
    if kind == "text":
        check = partial(_check_rows, read_text_meta(directory, fields))
    else:
        images, rows_per_block = read_image_meta(path, fields)
        suffixes, check = images.suffixes, partial(_check_images, images, stored_maps(path, dataset))
    second = second_directories(path, dataset)
    for folder in ("shards", *second):
        for tar in sorted((directory / folder).glob("*.tar")):
            if tar.name not in shards:
                raise DataError(f"{tar}: not listed in dataset.json")
        if (binary := find_index(directory / folder)) is not None:
            binary.verify()
    entries = blocks = rows = size = 0
    seen: set[str] = set()
    external = find_external_tars(directory / "shards")
    for name in shards:
        shard = directory / "shards" / name
        index = read_index(shard)
        if external is None:
            _verify_shard(shard, index, suffixes, check)
        else:
            _verify_external(shard, index, external)
        for block in index.blocks:
            if external is None and block.key in seen:  # keys of external tars may repeat
                raise DataError(f"{shard}: block {shorten(block.key)}: the key is used twice in the data set")
            seen.add(block.key)
        entries += len(index.blocks)
        blocks += -(-len(index.blocks) // rows_per_block)
        rows += sum(block.rows for block in index.blocks)
        size += index.size
    for what, count in (("blocks", entries), ("rows", rows)):
        if dataset.get(what, count) != count:
            raise DataError(f"{path}: {quote(dataset[what])} {what} written there, {count} found")
    for folder, modality in second.items():
        for name in shards:
            index = read_index(directory / folder / name)
            _verify_shard(directory / folder / name, index, [modality.suffix], check)
            _check_aligned(directory / "shards" / name, directory / folder / name, modality.suffix)
            size += index.size
    return Verified(shards=len(shards), blocks=blocks, rows=rows, bytes=size)


def _verify_shard(shard: Path, index: ShardIndex, suffixes: Sequence[str], check: CheckContents) -> None:
    """Compare the whole tar with its index."""
    if not shard.exists():
        raise DataError(f"{shard}: not found")
    size = shard.stat().st_size
    if index.shard != shard.name or index.size != size:
        raise DataError(f"{shard}: {size} bytes found, its index says {index.size} bytes of {shorten(index.shard)}")
    for block in index.blocks:
        check_members(shard, block.key, set(block.members), tuple(suffixes))
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
                check(f"{shard}: block {block.key}", named, contents, block)
                contents = {}
        _verify_zeros(f"{shard}: end of the tar", stream.read(), position)


def _verify_header(where: str, header: bytes, position: int, block: Block, suffix: str) -> None:
    """Raise DataError unless the tar header is intact and has the name and length of the member."""
    location = f"{where}, bytes {position}-{position + _TAR_UNIT - 1}"
    try:
        entry = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise DataError(f"{location}: damaged tar header ({error_text(error)})") from error
    if header[148:156] != f"{entry.chksum:06o}\0 ".encode():  # the checksum does not cover its own field
        raise DataError(f"{location}: damaged tar header (checksum field)")
    length = block.members[suffix].length
    if (entry.name, entry.size) != (f"{block.key}.{suffix}", length):
        raise DataError(
            f"{location}: the tar holds {shorten(entry.name)} of {entry.size} bytes, the index says {length} bytes"
        )


def _verify_content(where: str, stream: IO[bytes], block: Block, suffix: str) -> tuple[str, bytes]:
    """Return the location of a member, for messages, and its content."""
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


def _verify_external(shard: Path, index: ShardIndex, store: ExternalTars) -> None:
    """Read an external tar completely and compare it with its index."""
    where = store.where(shard)
    source = read_index_document(shard).fields.section("source").document.get("choice")
    choice = record(
        MemberChoice, source, f"{index_path(shard)}: which members were read", DataError, "index the tars again"
    )
    with os.fdopen(store.open(StoredPart(shard, index.size)), "rb", buffering=0) as stream:
        blocks, _ = read_tar(where, stream, choice, check=check_decodes)  # type: ignore[arg-type]  # raw, as a tar needs
    advice = f"index the tars again: trp-scale index {shard.parent.parent}"
    for ours, theirs in zip(index.blocks, blocks, strict=False):
        if ours != theirs:
            raise DataError(
                f"{where}: image {shorten(theirs.key)}: {quote(theirs)} found, the index says {quote(ours)}; {advice}"
            )
    if len(index.blocks) != len(blocks):
        raise DataError(f"{where}: {len(blocks)} images found, the index has {len(index.blocks)}; {advice}")


def _check_rows(meta: TextMeta, where: str, places: dict[str, str], contents: dict[str, bytes], block: Block) -> None:
    """Raise DataError if the arrays of a text block do not match dataset.json."""
    arrays = {suffix: parse_npy(memoryview(content), places[suffix]) for suffix, content in contents.items()}
    shape = (block.rows, meta.row_length)
    for suffix, dtype in (("tokens.npy", meta.token_dtype), ("tags.npy", "uint8"), ("sentences.npy", "uint16")):
        array = arrays[suffix]
        wanted = shape if suffix != "sentences.npy" else (block.rows, max(1, array.shape[-1] if array.ndim else 0))
        if array.dtype != np.dtype(dtype) or array.shape != wanted:
            raise DataError(f"{where}, {suffix}: {array.dtype} {array.shape} found, {dtype} {wanted} expected")
    tokens, tags = arrays["tokens.npy"], arrays["tags.npy"]  # [R, row_length]
    ends = arrays["sentences.npy"].astype(np.int64)  # [R, S]
    lengths = ends[:, -1]
    padding = np.arange(shape[1]) >= lengths[:, None]  # [R, row_length]
    checks = (
        (tokens >= meta.vocab_size, f"a piece that is not below vocab_size {meta.vocab_size}"),
        ((tags & GROUP_BITS >= len(GROUPS)) | (tags & ~np.uint8(GROUP_BITS | WORD_START) != 0), "a tag of no group"),
        ((lengths < 1) | (lengths > shape[1]), f"a row length outside 1-{shape[1]}"),
        ((ends[:, 0] < 1) | (np.diff(ends, axis=1) < 0).any(axis=1), "sentence ends that do not ascend"),
        (padding & (tokens != meta.special_tokens["pad"]), "a piece behind the end of the row"),
        (padding & (tags != OTHER), "a tag behind the end of the row"),
    )
    for wrong, what in checks:
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            raise DataError(f"{where}, row {row}: {what}")


def _check_images(
    meta: ImageMeta,
    maps: Mapping[str, StoredMaps],
    where: str,
    places: dict[str, str],
    contents: dict[str, bytes],
    block: Block,
) -> None:
    """Raise DataError if an image does not decode, a map has a wrong format or size, or the class does not exist."""
    if block.rows != 1:
        raise DataError(f"{where}: {block.rows} rows found, 1 expected of an image")
    size = None  # `_check_aligned` compares the size of maps in other tars
    if IMAGE in contents:
        size = check_decodes(places[IMAGE], contents[IMAGE], ("JPEG",), ("RGB", "L"))
    for name, form in map_formats().items():
        if form.suffix in contents:
            try:
                numbers = form.decode(contents[form.suffix], size)
                form.check(numbers, maps[name])
            except DataError as error:
                raise DataError(f"{places[form.suffix]}: {error}") from error
    if block.label is not None and CLASS not in block.members:
        raise DataError(f"{where}: the index says class {block.label}, and there is no member .{CLASS}")
    if CLASS in contents:
        text, names = contents[CLASS], meta.classes
        if not text.isdigit() or (names is not None and (len(text) > 18 or int(text) >= len(names))):
            allowed = "a number from 0" if names is None else f"a number from 0 to {len(names) - 1}"
            raise DataError(f"{places[CLASS]}: class {text[:20]!r} found, {allowed} expected")
        if text != str(block.label).encode():
            raise DataError(f"{places[CLASS]}: class {text[:20]!r} found, the index says {block.label}")


def _check_aligned(images: Path, maps: Path, suffix: str) -> None:
    """Raise DataError if a tar of maps differs from the tar of images in a key or an image size."""
    if difference := first_difference(images, maps):
        raise DataError(difference)
    sizes = images.stat().st_size, maps.stat().st_size
    blocks = zip(read_index(images).blocks, read_index(maps).blocks, strict=True)
    with images.open("rb") as image_stream, maps.open("rb") as map_stream:
        for image, map_ in blocks:
            where = f"{maps}: block {map_.key}, member {suffix}"
            width, height = open_stored(where, read_member(image_stream, image.members[IMAGE], sizes[0])).size
            size = png_size(read_member(map_stream, map_.members[suffix], sizes[1]).ljust(24, b"\0"))
            if size != (height, width):
                raise DataError(f"{where}: {size[1]} x {size[0]} pixels, the image has {width} x {height}")


def read_member(stream: Any, member: StoredMember, size: int) -> bytes:
    """Read a member of a tar of `size` bytes; offsets beyond the end, from a damaged index, are clamped."""
    stream.seek(min(member.offset, size))
    return bytes(stream.read(min(member.length, size)))


def open_stored(name: str, content: bytes, formats: Sequence[str] = ("JPEG",)) -> Image.Image:
    """Read the header of an image in one of `formats`.

    Raises:
        DataError: with the location.
    """
    try:
        return Image.open(io.BytesIO(content), formats=formats)
    except Exception as error:  # Pillow raises many types for damaged files
        raise _undecodable(name, formats, error) from error


def check_decodes(
    name: str, content: bytes, formats: Sequence[str] = ("JPEG", *FORMATS), modes: Sequence[str] = ()
) -> tuple[int, int]:
    """Decode an image and return (H, W). If `modes` is set, the image mode must be in it.

    Raises:
        DataError: with the location.
    """
    image = open_stored(name, content, formats)
    height, width = image.height, image.width  # `draft` changes them
    try:
        refuse_too_many_pixels(height, width)
        refuse_too_many_scans(content)
        image.draft(image.mode, (1, 1))  # JPEG: decode all entropy-coded bytes at 1/8 size
        image.load()
    except Exception as error:  # as in open_stored
        raise _undecodable(name, formats, error) from error
    if modes and image.mode not in modes:
        raise DataError(f"{name}: mode {image.mode} found, {' or '.join(modes)} expected")
    return height, width


def _undecodable(name: str, formats: Sequence[str], error: Exception) -> DataError:
    kind = "a JPEG" if len(formats) == 1 else "an image"
    return DataError(f"{name}: not {kind} that can be decoded ({error_text(error)})")


log = logging.getLogger(__name__)


def merge(directory: Path, max_skipped: float | None = None) -> None:
    """Merge the parts of a data set or of its labels. The result has the bytes of a single run; a finished data set
    does not change.

    Args:
        max_skipped: largest share of skipped items; None: the setting of the parts.

    Raises:
        DataError: parts are missing, still running or have different settings, or too many items were skipped.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; give that of --output or --data of the parts")
    labels = sorted({path.parent.parent for path in directory.glob("*/progress/part-*.json")})
    if not labels and (directory / "dataset.json").exists() and not (directory / "progress").exists():
        log.info("%s is finished: nothing to merge", directory)
        return
    for output in labels or [directory]:
        parts = all_parts(output)
        kind = _kind(directory, output, *next(iter(parts.items())))
        with ExitStack() as stack:
            stack.enter_context(only_run(output, "merge.lock"))
            for part in parts:
                stack.enter_context(only_run(output, part.lock))
            shards, _ = finish_dataset(output, kind, max_skipped)
        with suppress(OSError):
            (output / "progress").rmdir()
        log.info("%s: %d parts are one data set of %d shards", output, len(parts), len(shards))


def _kind(directory: Path, output: Path, part: Part, document: dict[str, Any]) -> DataKind[Any]:
    name = document["kind"]
    if output != directory:
        if name not in map_formats():
            raise DataError(
                f"{part.path(output)}: modality {quote(name)} found, one of {', '.join(map_formats())} expected; run "
                "pseudo-label again with the same flags"
            )
        return label_kind(directory, read_json(directory / "dataset.json"), name)
    if name == TARS:
        return stored_tars(directory, part, document)
    return TEXT if name == "text" else IMAGES
