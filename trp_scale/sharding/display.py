"""Display of stored samples: text rows coloured by part-of-speech group; images with classes and maps, as lines and as
a contact sheet. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image, ImageDraw
from rich.text import Text
from tokenizers import Tokenizer

from trp_scale.data.images.dataset import decode_image, first_difference
from trp_scale.data.images.formats import FORMATS, png_size
from trp_scale.data.images.maps import CLASS, OWN_TAR, StoredMaps, class_names, known_suffixes, map_formats, stored_maps
from trp_scale.data.index import Block, read_fields, read_index
from trp_scale.data.samples import read_samples
from trp_scale.data.tar_reader import ArrayReader, SampleReader
from trp_scale.data.text.dataset import GROUP_BITS, GROUPS, SUFFIXES
from trp_scale.data.text.tokenizer import load_for_sharding
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities import modality
from trp_scale.sharding.verify import open_stored

STYLES = {
    "verb": "bold red",
    "noun": "blue",
    "adjective": "green",
    "determiner": "yellow",
    "adverb": "magenta",
    "pronoun": "cyan",
    "preposition": "bright_yellow",
    "conjunction": "bright_magenta",
    "interjection": "bold white on red",
    "other": "dim",
}
"""Rich style of each group."""


def _blocks_from(shard: Path, kind: str, key: str | None) -> list[tuple[int, Block]]:
    """Return the blocks of a shard with their numbers, starting at `key`; raise DataError if the shard has no such
    key."""
    blocks = read_index(shard).blocks
    keys = [block.key for block in blocks]
    if key is not None and key not in keys:
        raise DataError(f"{shard}: no {kind} {key!r}; there are {keys[0]} to {keys[-1]}")
    return list(enumerate(blocks))[0 if key is None else keys.index(key) :]


def read_block(shard: Path, block: Block) -> dict[str, NDArray[Any]]:
    """Read the arrays of a text block by suffix. Checksums are left to `verify`.

    Raises:
        DataError: a member is unknown, damaged or outside the tar.
    """
    table, blocks = read_samples(shard.parent, [shard.name], SUFFIXES, None, use_index=False)
    arrays = ArrayReader(table, blocks, verify=False).arrays(blocks.keys.index(block.key))
    return dict(zip(SUFFIXES, arrays, strict=True))


def legend() -> Text:
    """Return the group names in their colours."""
    return Text(" ").join(Text(group, style=STYLES[group]) for group in GROUPS)


def row_texts(shard: Path, rows: int, key: str | None = None) -> Iterator[tuple[str, Text]]:
    """Yield (block and row, text) of the first rows of a shard or of block `key`. `|` ends a sentence.

    Raises:
        DataError: the block does not exist, or the shard cannot be read.
    """
    blocks = _blocks_from(shard, "block", key)  # first: a path that is no shard is named
    tokenizer = load_for_sharding(shard.parent.parent / "tokenizer")
    for _, block in blocks if key is None else blocks[:1]:
        arrays = read_block(shard, block)
        for row in range(min(rows, block.rows)):
            ends = arrays["sentences.npy"][row].tolist()
            pieces = arrays["tokens.npy"][row, : ends[-1]].tolist()
            tags = arrays["tags.npy"][row, : ends[-1]].tolist()
            yield f"{block.key} row {row}", _row_text(tokenizer, pieces, tags, set(ends))
        rows -= min(rows, block.rows)
        if rows == 0:
            return


def _row_text(tokenizer: Tokenizer, pieces: list[int], tags: list[int], ends: set[int]) -> Text:
    text = Text()
    for position, (piece, tag) in enumerate(zip(pieces, tags, strict=True)):
        name = tokenizer.id_to_token(piece) or f"<{piece}>"
        continues = name.startswith("##")
        if position and not continues:
            text.append(" ")
        text.append(name.removeprefix("##") if continues else name, style=STYLES[GROUPS[tag & GROUP_BITS]])
        if position + 1 in ends:
            text.append(" |", style="bold")
    return text


CAPTION = 12
"""Pixels of the caption below each image of a contact sheet."""


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """One stored sample: key, class name or number, members and map descriptions by suffix."""

    key: str
    label: str
    members: dict[str, bytes]
    maps: dict[str, StoredMaps]

    def describe(self) -> str:
        """Return the class, and of each image and map the size and the meaning of its colours on a contact sheet."""
        parts = [f"class {self.label}"] if self.label else []
        for suffix, content in self.members.items():
            if suffix != CLASS:
                image = open_stored(f".{suffix}", content, ("JPEG", *FORMATS))
                parts.append(f"{suffix} {image.width} x {image.height} {image.mode}, {len(content):,} bytes")
            if suffix in self.maps:
                meaning = modality(self.maps[suffix].name).meaning(self.maps[suffix])
                parts[-1] += f", {meaning}" if meaning else ""
        return "  ".join(parts)

    def pictures(self) -> list[Image.Image]:
        """Return the image and its maps as RGB."""
        pictures = []
        for suffix, content in self.members.items():
            if suffix in self.maps:
                form = map_formats()[self.maps[suffix].name]
                numbers = form.decode(content, png_size(content) if form.fits(content) else None)
                pictures.append(Image.fromarray(modality(self.maps[suffix].name).colours(numbers)))
            elif suffix != CLASS:
                pixels = decode_image(bytearray(content)).permute(1, 2, 0)  # [H, W, 3]
                pictures.append(Image.fromarray(pixels.numpy()))
        return pictures


def stored_images(shard: Path, count: int, key: str | None = None) -> Iterator[StoredImage]:
    """Yield images of a shard with all their maps, starting at `key`. `shard` may also be a tar of maps.

    Raises:
        DataError: the key does not exist, the shard cannot be read, or it has an unlisted member.
    """
    directory = shard.parent.parent
    path = directory / "dataset.json"
    fields = read_fields(path, "shard the images again")
    suffixes = tuple(fields.texts("suffixes"))
    shard = directory / OWN_TAR / shard.name
    described = stored_maps(path, fields.document)
    classes = class_names(fields)
    blocks = _blocks_from(shard, "image", key)[:count]
    members_of_tars = {shard: suffixes}
    for maps in described.values():
        if (tar := directory / maps.directory / shard.name) != shard:
            members_of_tars[tar] = (maps.suffix,)
            if difference := first_difference(shard, tar):
                raise DataError(difference)
    tables = [
        read_samples(tar.parent, [tar.name], names, 1, use_index=False)[0] for tar, names in members_of_tars.items()
    ]
    readers = [SampleReader(table, verify=False) for table in tables]
    for number, block in blocks:
        members: dict[str, bytes] = {}
        for reader in readers:
            members.update(zip(reader.table.suffixes, map(bytes, reader.members(number)), strict=True))
        label = "" if block.label is None else str(block.label)
        if block.label is not None and classes and block.label < len(classes):
            label = f"{block.label} ({classes[block.label]})"
        yield StoredImage(key=block.key, label=label, members=members, maps={m.suffix: m for m in described.values()})


def is_image_shard(blocks: list[Block]) -> bool:
    """Whether the blocks of an index are images or maps."""
    return bool(blocks) and not set(known_suffixes()).isdisjoint(blocks[0].members)


def contact_sheet(images: list[StoredImage], side: int = 128) -> Image.Image:
    """Return a sheet of all images, each at most `side` pixels, next to its maps and above its class and key."""
    across = max(len([suffix for suffix in images[0].members if suffix != CLASS]), 1)
    columns = max(1, min(len(images), 8 // across))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * across * side, rows * (side + CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for position, image in enumerate(images):
        top, left = position // columns * (side + CAPTION), position % columns * across * side
        for number, picture in enumerate(image.pictures()):
            picture.thumbnail((side - 2, side - 2))
            sheet.paste(picture, (left + number * side, top + side - picture.height))
        draw.text((left, top + side), f"{image.label} {image.key}".strip()[: across * side // 6], "black", font_size=10)
    return sheet
