"""Stored bytes of an image and its maps: unchanged where possible, otherwise re-encoded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from trp_scale.data.images.crops import pick_centres
from trp_scale.data.images.formats import UnknownRangeError, as_rgb, refuse_too_many_scans, write_png
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.base import MapFiles
from trp_scale.sharding.images.files import Loaded, UnusableError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Accepted formats. Other Pillow formats start programs (EPS) or need another library."""

DEFAULT_QUALITY = 95

MAX_SIDE = 1 << 20
"""Pixels. For a line of 70 million pixels Pillow raises MemoryError, which would end the run."""

_TILE_WIDTH, _TILE_HEIGHT = 322, 323

ORIENTATION = 0x0112
"""EXIF tag; 1 is upright."""


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """How images and maps are stored.

    Attributes:
        short_side, quality: 0 = unchanged.
        max_pixels: of an image.
        maps: conversion of maps by suffix.
    """

    short_side: int
    quality: int
    max_pixels: int
    maps: Mapping[str, MapFiles] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Stored bytes of an image and its maps by suffix. `size`: (width, height). `unchanged`: the bytes of the file."""

    image: bytes
    maps: dict[str, bytes]
    size: tuple[int, int]
    unchanged: bool


def encode_sample(loaded: Loaded, settings: EncodeSettings) -> Encoded:
    """Encode an image as an upright RGB or grey JPEG, and its maps as PNG.

    Raises:
        UnusableError: the image or a map cannot be used.
    """
    if isinstance(loaded.image, bytes):
        if not loaded.image:
            raise UnusableError("empty")
        image = open_image(loaded.image, settings.max_pixels)
    else:
        image = loaded.image
    upright = _upright_size(image)
    size = _target_size(upright, settings.short_side)
    keeps = isinstance(loaded.image, bytes) and size == upright and not settings.quality and _is_plain_jpeg(image)
    with _convert_decoder_errors():
        if isinstance(loaded.image, bytes) and keeps:
            image.draft(image.mode, (1, 1))  # decode all entropy-coded bytes at 1/8 size
            image.load()
            content = loaded.image
        else:
            if size != upright:
                image.draft(None, (2 * max(size), 2 * max(size)))  # JPEG: decode at the smallest sufficient scale
            content = _jpeg(image, size, settings.quality or DEFAULT_QUALITY)
    maps = {suffix: _map(settings.maps[suffix], stored, upright, size) for suffix, stored in loaded.maps.items()}
    return Encoded(image=content, maps=maps, size=size, unchanged=keeps)


@contextmanager
def _convert_decoder_errors() -> Iterator[None]:
    """Convert any decoder error (OSError, SyntaxError, struct.error, ValueError ...) to UnusableError."""
    try:
        yield
    except (UnusableError, MemoryError):
        raise
    except Exception as error:
        raise UnusableError("damaged", f"{type(error).__name__}: {error}") from error


def open_image(content: bytes, max_pixels: int) -> Image.Image:
    """Read the header of an image. `max_pixels` replaces Pillow's limit, which only warns up to twice its value.

    Raises:
        UnusableError: not an image, a damaged header, or too many pixels or scans.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with _convert_decoder_errors():
            try:
                image = Image.open(io.BytesIO(content), formats=FORMATS)
            except UnidentifiedImageError as error:
                raise UnusableError("not_an_image") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    for width, height in (image.size, _tile_size(image)):
        if width * height > max_pixels or max(width, height) > MAX_SIDE:
            raise UnusableError("too_many_pixels", f"{width} x {height}")
    with _convert_decoder_errors():
        refuse_too_many_scans(content)
    return image


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Return (width, height) of TIFF tiles, else 0. libtiff decodes whole tiles, even if they exceed the image."""
    with _convert_decoder_errors():
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        return int(tags.get(_TILE_WIDTH, 0)), int(tags.get(_TILE_HEIGHT, 0))


def _orientation(image: Image.Image) -> int:
    with _convert_decoder_errors():
        return int(image.getexif().get(ORIENTATION, 1))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Return (width, height) after the EXIF rotation."""
    width, height = image.size
    return (height, width) if _orientation(image) in (5, 6, 7, 8) else (width, height)


def _target_size(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Return (width, height) with the short side reduced to `short_side`."""
    short = min(size)
    if not short_side or short <= short_side:
        return size
    width, height = (max(1, round(side * short_side / short)) for side in size)
    return width, height


def _is_plain_jpeg(image: Image.Image) -> bool:
    """Whether the image is an upright baseline JPEG in 8-bit RGB or grey."""
    return (
        image.format == "JPEG"
        and image.mode in ("RGB", "L")
        and not image.info.get("progressive")
        and _orientation(image) == 1
    )


def _jpeg(image: Image.Image, size: tuple[int, int], quality: int) -> bytes:
    try:
        image = as_rgb(ImageOps.exif_transpose(image))
    except UnknownRangeError as error:
        raise UnusableError("unsupported_mode") from error
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality, subsampling="4:4:4" if quality >= DEFAULT_QUALITY else "4:2:0")
    return stream.getvalue()


def _map(files: MapFiles, content: bytes, upright: tuple[int, int], size: tuple[int, int]) -> bytes:
    """Return the bytes of a map: unchanged, or resized with the nearest pixel (never interpolated)."""
    suffix = files.format.suffix
    found_size = files.size(content)
    if found_size is None:
        raise UnusableError("bad_map", suffix)
    height, width = found_size
    if (width, height) != upright:
        raise UnusableError("map_size", f"{suffix}: {(width, height)}, the image {upright}")
    try:
        decoded = files.decode(content)
    except Exception as error:  # decoders raise many types
        raise UnusableError("bad_map", f"{suffix}, {type(error).__name__}: {error}") from error
    try:
        numbers = files.numbers(decoded)
        files.check(numbers)
    except DataError as error:
        raise UnusableError("bad_map_number", f"{suffix}: {error}") from error
    if size == upright and numbers is decoded and files.format.fits(content):
        return content
    return write_png(numbers if size == upright else pick_centres(numbers, size[1], size[0]))
