"""Stored images for the eye: a line about each, and a contact sheet."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trp_scale.data.images.members import SUFFIXES
from trp_scale.data.images.stored_modalities import OWN_TAR, Direction, class_names, stored_modalities
from trp_scale.data.index import Block, DataError, read_index, read_json
from trp_scale.preparation.images.verify import check_members

CAPTION = 12
"""Pixels under each image of a contact sheet."""

SHADES: dict[Direction, str] = {"farther": "black (near) to white (far)", "nearer": "black (far) to white (near)"}
"""How depth looks on a contact sheet, by what a larger number means."""

_COLOURS = np.stack([np.arange(256) * step % 256 for step in (67, 113, 197)], axis=1).astype(np.uint8)
"""Colour of each number of a segmentation map, [256, 3]: neighbours differ."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One stored sample: its key, the name or number of its class, its members by suffix, what larger depth means."""

    key: str
    label: str
    members: dict[str, bytes]
    larger_is: Direction

    def line(self) -> str:
        """Class, of each image its size in pixels and bytes, and how depth looks on a contact sheet."""
        parts = [f"class {self.label}"] if self.label else []
        for suffix, content in self.members.items():
            if suffix != "cls":
                image = Image.open(io.BytesIO(content))
                parts.append(f"{suffix} {image.width} x {image.height} {image.mode}, {len(content):,} bytes")
            if suffix == "depth.png":
                parts[-1] += f", {SHADES[self.larger_is]}"
        return "  ".join(parts)


def stored_images(shard: Path, count: int, key: str | None = None) -> Iterator[Shown]:
    """The first images of a shard, or those from `key` on, with all their maps; of a tar of maps, the same.

    Raises:
        DataError: no such key, or the shard cannot be read, or it holds a member that is not listed.
    """
    directory = shard.parent.parent
    path = directory / "dataset.json"
    dataset = read_json(path)
    shard = directory / OWN_TAR / shard.name
    blocks = read_index(shard).blocks
    described, classes = stored_modalities(path, dataset), class_names(path, "classes", dataset.get("classes"))
    larger_is = described["depth"].larger_is if "depth" in described else "farther"
    second = [each for each in described.values() if each.directory != OWN_TAR]
    maps = [_Maps(directory / each.directory / shard.name, each.suffix) for each in second]
    keys = [block.key for block in blocks]
    if key is not None and key not in keys:
        raise DataError(f"{shard}: no image {key!r}; there are {keys[0]} to {keys[-1]}")
    first = 0 if key is None else keys.index(key)
    with shard.open("rb") as stream:
        for block in blocks[first : first + count]:
            check_members(shard, block, dataset)
            members = {}
            for suffix in dataset["suffixes"]:
                member = block.members[suffix]
                stream.seek(member.offset)
                members[suffix] = stream.read(member.length)
            members |= {each.suffix: each.read(block.key) for each in maps}
            label = _label(members, classes)
            yield Shown(key=block.key, label=label, members=members, larger_is=larger_is)


def is_image_shard(blocks: list[Block]) -> bool:
    """Whether the blocks of an index are images, or maps of images."""
    return bool(blocks) and not set(SUFFIXES).isdisjoint(blocks[0].members)


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
            stream.seek(member.offset)
            return stream.read(member.length)


def _label(members: dict[str, bytes], classes: tuple[str, ...] | None) -> str:
    """Number and name of the class, or ""."""
    if "cls" not in members:
        return ""
    text = members["cls"].decode("ascii", "replace")
    return f"{text} ({classes[int(text)]})" if classes and text.isdigit() and int(text) < len(classes) else text


def contact_sheet(images: list[Shown], side: int = 128) -> Image.Image:
    """All images, each fitted into `side` pixels with its maps beside it and its class and key below."""
    across = max(len([suffix for suffix in images[0].members if suffix != "cls"]), 1)
    columns = max(1, min(len(images), 8 // across))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * across * side, rows * (side + CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, shown in enumerate(images):
        top, left = place // columns * (side + CAPTION), place % columns * across * side
        pictures = [_picture(suffix, content) for suffix, content in shown.members.items() if suffix != "cls"]
        for number, picture in enumerate(pictures):
            picture.thumbnail((side - 2, side - 2))
            sheet.paste(picture, (left + number * side, top + side - picture.height))
        draw.text((left, top + side), f"{shown.label} {shown.key}".strip()[: across * side // 6], "black", font_size=10)
    return sheet


def _picture(suffix: str, content: bytes) -> Image.Image:
    """A member as RGB: depth from black (smallest) to white (largest; SHADES), class numbers in colours."""
    image = Image.open(io.BytesIO(content))
    if suffix == "depth.png":
        depth = np.asarray(image).astype(np.float32)
        low, high = float(depth.min()), float(depth.max())
        return Image.fromarray(((depth - low) * (255 / max(high - low, 1))).astype(np.uint8)).convert("RGB")
    if suffix == "semseg.png":
        return Image.fromarray(_COLOURS[np.asarray(image)])
    return image.convert("RGB")
