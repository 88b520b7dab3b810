"""Stored images for the eye: a line about each, and a contact sheet."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from trp_scale.data.images.formats import FORMATS, png_size
from trp_scale.data.images.maps import CLASS, OWN_TAR, StoredMaps, class_names, known_suffixes, map_formats, stored_maps
from trp_scale.data.images.rows import decode_image
from trp_scale.data.index import Block, read_fields, read_index
from trp_scale.data.stores import find_store
from trp_scale.data.stores.tars import StoredPart
from trp_scale.errors import DataError, error_text
from trp_scale.pretraining.modalities import modality
from trp_scale.sharding.images.verify import check_members

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
                image = _open_stored(suffix, content)
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
            members = {}
            for suffix in suffixes:
                member = block.members[suffix]
                stream.seek(min(member.offset, index.size))
                members[suffix] = stream.read(min(member.length, index.size))
            members |= {entry.suffix: entry.read(block.key) for entry in maps}
            label = _label(block.label, classes)
            yield Shown(key=block.key, label=label, members=members, maps=of_suffix)


def _open_stored(suffix: str, content: bytes) -> Image.Image:
    """An image or a map whose header can be read; nothing else than the formats that are stored is opened."""
    try:
        return Image.open(io.BytesIO(content), formats=("JPEG", *FORMATS))
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f".{suffix}: not an image that can be decoded ({error_text(error)})") from error


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
            size = self._tar.stat().st_size
            stream.seek(min(member.offset, size))
            return stream.read(min(member.length, size))


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
