"""Check the members of image samples."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

from PIL import Image

from trp_scale.data.images.dataset import first_difference
from trp_scale.data.images.formats import FORMATS, png_size, refuse_too_many_pixels, refuse_too_many_scans
from trp_scale.data.images.maps import CLASS, IMAGE, OWN_MODALITY, known_suffixes, map_formats
from trp_scale.data.index import Block, StoredMember, read_index
from trp_scale.errors import DataError, error_text, quote, shorten

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
    # None: maps beside the image's tar, see check_aligned
    size = _check_image(places[IMAGE], contents[IMAGE]) if IMAGE in contents else None
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
    """An image of a tar that others made: a JPEG, PNG or WebP that decodes.

    Raises:
        DataError: naming the place.
    """
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", *FORMATS)) as image:
            refuse_too_many_pixels(image.height, image.width)
            refuse_too_many_scans(content)
            image.draft(image.mode, (1, 1))  # a JPEG: an eighth of the size, all of the entropy-coded bytes
            image.load()
    except Exception as error:  # as in _open_image
        raise DataError(f"{name}: not an image that can be decoded ({error_text(error)})") from error


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
            width, height = _open_image(where, _content(image_stream, image.members[IMAGE])).size
            size = png_size(_content(map_stream, map_.members[suffix]).ljust(24, b"\0"))
            if size != (height, width):
                raise DataError(f"{where}: {size[1]} x {size[0]} pixels, the image has {width} x {height}")


def _content(stream: IO[bytes], member: StoredMember) -> bytes:
    stream.seek(member.offset)
    return stream.read(member.length)


def _open_image(name: str, content: bytes) -> Image.Image:
    """An image whose header can be read."""
    try:
        return Image.open(io.BytesIO(content), formats=("JPEG",))
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f"{name}: not a JPEG that can be decoded ({error_text(error)})") from error


def _check_image(name: str, content: bytes) -> tuple[int, int]:
    """(H, W) of an image that decodes."""
    image = _open_image(name, content)
    width, height = image.size
    try:
        refuse_too_many_pixels(height, width)
        refuse_too_many_scans(content)
        image.draft(image.mode, (1, 1))  # an eighth of the size, all of the entropy-coded bytes
        image.load()
    except Exception as error:  # as in _open_image
        raise DataError(f"{name}: not a JPEG that can be decoded ({error_text(error)})") from error
    if image.mode not in IMAGE_MODES:
        raise DataError(f"{name}: mode {image.mode} found, {' or '.join(IMAGE_MODES)} expected")
    return height, width
