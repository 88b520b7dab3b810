"""PNG and WebP images, which tars that others made may hold. Pillow decodes them: torchvision's decoder of PNG ends the
process on most damaged files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trp_scale.data.images.pixel_limit import refuse_too_many_pixels

FORMATS = ("PNG", "WEBP")
"""Pillow's names of them. Nothing else is opened: Pillow starts programs for some formats."""


def is_other_format(content: bytes | bytearray) -> bool:
    """Whether a file begins as a PNG or a WebP does, whatever its name says."""
    return content[:8] == b"\x89PNG\r\n\x1a\n" or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")


def decode_other_format(content: bytes | bytearray) -> npt.NDArray[np.uint8]:
    """The pixels of a PNG or WebP, [H, W, 3]; transparent ones show white.

    Raises:
        DataError: more than MOST_PIXELS.
        Exception: whatever a broken file leads Pillow to.
    """
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        refuse_too_many_pixels(image.height, image.width)
        pixels: npt.NDArray[np.uint8] = np.array(as_rgb(image))
    return pixels


class UnknownRangeError(ValueError):
    """An image of 32-bit pixels: nobody can know their range."""


def as_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of any mode; transparent pixels show white.

    Raises:
        UnknownRangeError: 32-bit pixels.
    """
    if image.mode in ("I", "F"):
        raise UnknownRangeError(f"pixels of mode {image.mode}, whose range nobody can know")
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 257).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        flat: Any = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = flat
    return image.convert("RGB")
