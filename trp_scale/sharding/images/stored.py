"""Stored images read back: what `verify` demands of them, a line about each, and a contact sheet."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from trp_scale.data.images.dataset import decode_image, first_difference
from trp_scale.data.images.formats import FORMATS, png_size, refuse_too_many_pixels, refuse_too_many_scans
from trp_scale.data.images.maps import (
    CLASS,
    IMAGE,
    OWN_MODALITY,
    OWN_TAR,
    StoredMaps,
    class_names,
    known_suffixes,
    map_formats,
    stored_maps,
)
from trp_scale.data.index import Block, StoredMember, read_fields, read_index
from trp_scale.data.stores.mirror import find_store
from trp_scale.data.stores.tars import StoredPart
from trp_scale.errors import DataError, error_text, quote, shorten
from trp_scale.pretraining.modalities import modality

IMAGE_MODES = ("RGB", "L")
"""Modes of Pillow that an image may have."""


def check_members(shard: Path, block: Block, dataset: dict[str, Any]) -> None:
    """A sample has the members that dataset.json names, and no other; nothing else would ever be opened.

    Raises:
        DataError: naming the member.
    """
    known = known_suffixes()
    unknown = sorted(set(dataset["suffixes"]) - set(known))
    if unknown:
        raise DataError(f"dataset.json: suffix {quote(unknown[0])} found, only {', '.join(known)} may be{OWN_MODALITY}")
    for suffix in block.members:
        if suffix not in dataset["suffixes"]:
            allowed = ", ".join(dataset["suffixes"])
            raise DataError(
                f"{shard}: block {shorten(block.key)}: member .{shorten(suffix)} is refused; only {allowed} may be"
            )
    for suffix in dataset["suffixes"]:
        if suffix not in block.members:
            raise DataError(f"{shard}: block {shorten(block.key)}: member .{suffix} is missing")


def check_contents(
    where: str, places: dict[str, str], contents: dict[str, bytes], block: Block, dataset: dict[str, Any]
) -> None:
    """Images decode, maps have their modality's form and their image's size, and all classes are of the data set's.

    Raises:
        DataError: naming `where` (the sample), or the place of a member.
    """
    if block.rows != 1:
        raise DataError(f"{where}: {block.rows} rows found, 1 expected of an image")
    # `None`: maps beside the image's tar, see check_aligned
    size = _check_image(places[IMAGE], contents[IMAGE], modes=IMAGE_MODES) if IMAGE in contents else None
    described = dataset.get("modalities") or {}
    for name, form in map_formats().items():
        if form.suffix in contents:
            try:
                numbers = form.decode(contents[form.suffix], size)
                form.check(numbers, form.stored(Path("dataset.json"), name, described.get(name, {})))
            except DataError as error:
                raise DataError(f"{places[form.suffix]}: {error}") from error
    if block.label is not None and CLASS not in block.members:
        raise DataError(f"{where}: the index says class {block.label}, and there is no member .{CLASS}")
    if CLASS in contents:
        text, names = contents[CLASS], dataset["classes"]
        if not text.isdigit() or (names is not None and (len(text) > 18 or int(text) >= len(names))):
            allowed = "a number from 0" if names is None else f"a number from 0 to {len(names) - 1}"
            raise DataError(f"{places[CLASS]}: class {text[:20]!r} found, {allowed} expected")
        if text != str(block.label).encode():
            raise DataError(f"{places[CLASS]}: class {text[:20]!r} found, the index says {block.label}")


def check_decodes(name: str, content: bytes) -> None:
    """Check that an image of an external tar, a JPEG, PNG or WebP, decodes.

    Raises:
        DataError: naming the place.
    """
    _check_image(name, content, ("JPEG", *FORMATS))


def check_aligned(images: Path, maps: Path, suffix: str) -> None:
    """Maps in a tar of their own have the keys of the images' tar, and their images' sizes.

    Args:
        images, maps: two tars, whole each by itself.
        suffix: of the maps.

    Raises:
        DataError: naming the tar and the key.
    """
    difference = first_difference(images, maps)
    if difference:
        raise DataError(difference)
    sizes = images.stat().st_size, maps.stat().st_size
    blocks = zip(read_index(images).blocks, read_index(maps).blocks, strict=True)
    with images.open("rb") as image_stream, maps.open("rb") as map_stream:
        for image, map_ in blocks:
            where = f"{maps}: block {map_.key}, member {suffix}"
            width, height = _open_image(where, _content(image_stream, image.members[IMAGE], sizes[0])).size
            size = png_size(_content(map_stream, map_.members[suffix], sizes[1]).ljust(24, b"\0"))
            if size != (height, width):
                raise DataError(f"{where}: {size[1]} x {size[0]} pixels, the image has {width} x {height}")


def _content(stream: Any, member: StoredMember, size: int) -> bytes:
    """Read a member of a tar of `size` bytes, whatever a damaged index says."""
    stream.seek(min(member.offset, size))
    return bytes(stream.read(min(member.length, size)))


def _open_image(name: str, content: bytes, formats: Sequence[str] = ("JPEG",)) -> Image.Image:
    """Read an image's header; no other format is opened than those that are stored."""
    try:
        return Image.open(io.BytesIO(content), formats=formats)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise _undecodable(name, formats, error) from error


def _check_image(
    name: str, content: bytes, formats: Sequence[str] = ("JPEG",), modes: Sequence[str] = ()
) -> tuple[int, int]:
    """Decode an image and return its (H, W); with `modes`, its mode must be one of them."""
    image = _open_image(name, content, formats)
    height, width = image.height, image.width  # `draft` changes them
    try:
        refuse_too_many_pixels(height, width)
        refuse_too_many_scans(content)
        image.draft(image.mode, (1, 1))  # a JPEG: an eighth of the size, all of the entropy-coded bytes
        image.load()
    except Exception as error:  # as in _open_image
        raise _undecodable(name, formats, error) from error
    if modes and image.mode not in modes:
        raise DataError(f"{name}: mode {image.mode} found, {' or '.join(modes)} expected")
    return height, width


def _undecodable(name: str, formats: Sequence[str], error: Exception) -> DataError:
    kind = "a JPEG" if len(formats) == 1 else "an image"
    return DataError(f"{name}: not {kind} that can be decoded ({error_text(error)})")


CAPTION = 12
"""Pixels under each image of a contact sheet."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One stored sample: its key, the name or number of its class, its members by suffix, what is said of its maps by
    suffix."""

    key: str
    label: str
    members: dict[str, bytes]
    maps: dict[str, StoredMaps]

    def line(self) -> str:
        """Class, of each image and map its size in pixels and bytes, and what its colours on a contact sheet mean."""
        parts = [f"class {self.label}"] if self.label else []
        for suffix, content in self.members.items():
            if suffix != CLASS:
                image = _open_image(f".{suffix}", content, ("JPEG", *FORMATS))
                parts.append(f"{suffix} {image.width} x {image.height} {image.mode}, {len(content):,} bytes")
            if suffix in self.maps:
                meaning = modality(self.maps[suffix].name).meaning(self.maps[suffix])
                parts[-1] += f", {meaning}" if meaning else ""
        return "  ".join(parts)

    def pictures(self) -> list[Image.Image]:
        """The image and its maps as RGB."""
        lines = []
        for suffix, content in self.members.items():
            if suffix in self.maps:
                form = map_formats()[self.maps[suffix].name]
                numbers = form.decode(content, png_size(content) if form.fits(content) else None)
                lines.append(Image.fromarray(modality(self.maps[suffix].name).colours(numbers)))
            elif suffix != CLASS:
                pixels = decode_image(bytearray(content)).permute(1, 2, 0)  # [H, W, 3]
                lines.append(Image.fromarray(pixels.numpy()))
        return lines


def stored_images(shard: Path, count: int, key: str | None = None) -> Iterator[Shown]:
    """The first images of a shard, or those from `key` on, with all their maps; of a tar of maps, the same.

    Raises:
        DataError: no such key, or the shard cannot be read, or it holds a member that is not listed.
    """
    directory = shard.parent.parent
    path = directory / "dataset.json"
    fields = read_fields(path, "shard the images again")
    dataset = fields.document
    suffixes = fields.texts("suffixes")
    shard = directory / OWN_TAR / shard.name
    index = read_index(shard)
    blocks = index.blocks
    described, classes = stored_maps(path, dataset), class_names(path, "classes", dataset.get("classes"))
    of_suffix = {entry.suffix: entry for entry in described.values()}
    second = [entry for entry in described.values() if entry.directory != OWN_TAR]
    maps = [_Maps(directory / entry.directory / shard.name, entry.suffix) for entry in second]
    keys = [block.key for block in blocks]
    if key is not None and key not in keys:
        raise DataError(f"{shard}: no image {key!r}; there are {keys[0]} to {keys[-1]}")
    first = 0 if key is None else keys.index(key)
    with os.fdopen(find_store(shard.parent).open(StoredPart(shard, index.size)), "rb") as stream:
        for block in blocks[first : first + count]:
            check_members(shard, block, dict(dataset))
            members = {suffix: _content(stream, block.members[suffix], index.size) for suffix in suffixes}
            members |= {entry.suffix: entry.read(block.key) for entry in maps}
            label = _label(block.label, classes)
            yield Shown(key=block.key, label=label, members=members, maps=of_suffix)


def is_image_shard(blocks: list[Block]) -> bool:
    """Whether the blocks of an index are images, or maps of images."""
    return bool(blocks) and not set(known_suffixes()).isdisjoint(blocks[0].members)


class _Maps:
    """A tar of maps beside the images' own."""

    def __init__(self, tar: Path, suffix: str) -> None:
        self.suffix = suffix
        self._tar = tar
        self._members = {block.key: block.members.get(suffix) for block in read_index(tar).blocks}

    def read(self, key: str) -> bytes:
        """The map of an image."""
        member = self._members.get(key)
        if member is None:
            raise DataError(
                f"{self._tar}: no .{self.suffix} of {key!r}, which is an image of {OWN_TAR}/{self._tar.name}"
            )
        with self._tar.open("rb") as stream:
            return _content(stream, member, self._tar.stat().st_size)


def _label(label: int | None, classes: tuple[str, ...] | None) -> str:
    """Number and name of the class, or ""."""
    if label is None:
        return ""
    return f"{label} ({classes[label]})" if classes and label < len(classes) else str(label)


def contact_sheet(images: list[Shown], side: int = 128) -> Image.Image:
    """All images, each fitted into `side` pixels with its maps beside it and its class and key below."""
    across = max(len([suffix for suffix in images[0].members if suffix != CLASS]), 1)
    columns = max(1, min(len(images), 8 // across))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * across * side, rows * (side + CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for position, shown in enumerate(images):
        top, left = position // columns * (side + CAPTION), position % columns * across * side
        for number, picture in enumerate(shown.pictures()):
            picture.thumbnail((side - 2, side - 2))
            sheet.paste(picture, (left + number * side, top + side - picture.height))
        draw.text((left, top + side), f"{shown.label} {shown.key}".strip()[: across * side // 6], "black", font_size=10)
    return sheet
