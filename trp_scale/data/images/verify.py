"""What the members of an image sample must hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from trp_scale.data.images.members import SUFFIXES
from trp_scale.data.index import Block, DataError

_MODES = {"jpg": ("RGB", "L"), "depth.png": ("I;16",), "semseg.png": ("L",)}
"""Modes of Pillow that a member may have."""


def check_members(shard: Path, block: Block, dataset: dict[str, Any]) -> None:
    """A sample has the members that dataset.json names, and no other; nothing else would ever be opened.

    Raises:
        DataError: naming the member.
    """
    unknown = sorted(set(dataset["suffixes"]) - set(SUFFIXES))
    if unknown:
        raise DataError(f"dataset.json: suffix {unknown[0]!r} found, only {', '.join(SUFFIXES)} may be")
    for suffix in block.members:
        if suffix not in dataset["suffixes"]:
            allowed = ", ".join(dataset["suffixes"])
            raise DataError(f"{shard}: block {block.key}: member .{suffix} is refused; only {allowed} may be")
    for suffix in dataset["suffixes"]:
        if suffix not in block.members:
            raise DataError(f"{shard}: block {block.key}: member .{suffix} is missing")


def check_contents(
    where: str, places: dict[str, str], contents: dict[str, bytes], block: Block, dataset: dict[str, Any]
) -> None:
    """Images decode, maps have their image's size, and the class is one of the data set's.

    Raises:
        DataError: naming `where` (the sample), or the place of a member.
    """
    if block.rows != 1:
        raise DataError(f"{where}: {block.rows} rows found, 1 expected of an image")
    sizes = {suffix: _size(places[suffix], content, suffix) for suffix, content in contents.items() if suffix in _MODES}
    for suffix, size in sizes.items():
        if size != sizes["jpg"]:
            raise DataError(f"{places[suffix]}: {size[0]} x {size[1]} pixels, the image has {sizes['jpg']}")
    if "cls" in contents:
        text = contents["cls"]
        names = dataset["classes"]
        if not text.isdigit() or (names is not None and int(text) >= len(names)):
            allowed = "a number from 0" if names is None else f"a number from 0 to {len(names) - 1}"
            raise DataError(f"{places['cls']}: class {text[:20]!r} found, {allowed} expected")


def _size(place: str, content: bytes, suffix: str) -> tuple[int, int]:
    """(width, height) of an image that decodes."""
    wanted = "JPEG" if suffix == "jpg" else "PNG"
    try:
        image = Image.open(io.BytesIO(content), formats=(wanted,))
        size: tuple[int, int] = image.size
        if suffix == "jpg":
            image.draft(image.mode, (1, 1))  # an eighth of the size, all of the entropy-coded bytes
        image.load()
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f"{place}: not a {wanted} that can be decoded ({error})") from error
    if image.mode not in _MODES[suffix]:
        raise DataError(f"{place}: mode {image.mode} found, {' or '.join(_MODES[suffix])} expected")
    return size
