"""What the members of an image sample must hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from trp_scale.data.images.aligned import first_difference
from trp_scale.data.images.members import SUFFIXES, VOID, unlisted_class
from trp_scale.data.index import Block, DataError, Member, read_index

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
    """Images decode, maps have their image's size, and all classes are of the data set's.

    Raises:
        DataError: naming `where` (the sample), or the place of a member.
    """
    if block.rows != 1:
        raise DataError(f"{where}: {block.rows} rows found, 1 expected of an image")
    decoded = {
        suffix: _decode(places[suffix], content, suffix) for suffix, content in contents.items() if suffix in _MODES
    }
    if "jpg" in contents:  # else maps beside the image's tar, see check_aligned
        width, height = _open(places["jpg"], contents["jpg"], "jpg").size
        for suffix, image in decoded.items():
            if suffix != "jpg" and image.size != (width, height):
                found = f"{image.width} x {image.height}"
                raise DataError(f"{places[suffix]}: {found} pixels, the image has {width} x {height}")
    classes = (dataset.get("modalities") or {}).get("semseg", {}).get("classes")
    if "semseg.png" in decoded and classes is not None:
        wrong = unlisted_class(np.asarray(decoded["semseg.png"]), len(classes))
        if wrong is not None:
            raise DataError(
                f"{places['semseg.png']}: class {wrong} found, 0 to {len(classes) - 1} or {VOID} (void) expected"
            )
    if block.label is not None and "cls" not in block.members:
        raise DataError(f"{where}: the index says class {block.label}, and there is no member .cls")
    if "cls" in contents:
        text, names = contents["cls"], dataset["classes"]
        if not text.isdigit() or (names is not None and int(text) >= len(names)):
            allowed = "a number from 0" if names is None else f"a number from 0 to {len(names) - 1}"
            raise DataError(f"{places['cls']}: class {text[:20]!r} found, {allowed} expected")
        if text != str(block.label).encode():
            raise DataError(f"{places['cls']}: class {text[:20]!r} found, the index says {block.label}")


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
    blocks = zip(read_index(images).blocks, read_index(maps).blocks, strict=True)
    with images.open("rb") as image_stream, maps.open("rb") as map_stream:
        for image, map_ in blocks:
            where = f"{maps}: block {map_.key}, member {suffix}"
            expected = _open(where, _content(image_stream, image.members["jpg"]), "jpg").size
            found = _open(where, _content(map_stream, map_.members[suffix]), suffix).size
            if found != expected:
                raise DataError(f"{where}: {found[0]} x {found[1]} pixels, the image has {expected[0]} x {expected[1]}")


def _content(stream: IO[bytes], member: Member) -> bytes:
    stream.seek(member.offset)
    return stream.read(member.length)


def _open(place: str, content: bytes, suffix: str) -> Image.Image:
    """An image whose header can be read."""
    wanted = "JPEG" if suffix == "jpg" else "PNG"
    try:
        return Image.open(io.BytesIO(content), formats=(wanted,))
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f"{place}: not a {wanted} that can be decoded ({error})") from error


def _decode(place: str, content: bytes, suffix: str) -> Image.Image:
    """An image that decodes, of one of its member's modes; a JPEG at an eighth of its size."""
    image = _open(place, content, suffix)
    try:
        if suffix == "jpg":
            image.draft(image.mode, (1, 1))  # an eighth of the size, all of the entropy-coded bytes
        image.load()
    except Exception as error:  # as in _open
        raise DataError(f"{place}: not a {image.format} that can be decoded ({error})") from error
    if image.mode not in _MODES[suffix]:
        raise DataError(f"{place}: mode {image.mode} found, {' or '.join(_MODES[suffix])} expected")
    return image
