"""Numbers in PNG files, the form of every stored map: grey or red, green and blue, of 8 or 16 bits.

Pillow decodes them: torchvision's decoder ends the process on most damaged files. Pillow itself has no image of three
16-bit channels, so these are unpacked twice, the upper bytes and the lower ones.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Map = npt.NDArray[Any]
"""The numbers of a map, [H, W] or [H, W, 3], uint8 or uint16."""

GREY, RGB, PALETTE = 0, 2, 3
"""Colour types of the PNG format."""

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2
"""The filter that stores each line as its difference from the line above."""


def png_format(content: bytes | bytearray) -> tuple[int, int]:
    """(bits of a channel, colour type) in the header of a PNG; (0, 0) of anything else."""
    if len(content) < 26 or content[:8] != SIGNATURE:
        return 0, 0
    return content[24], content[25]


def png_size(content: bytes | bytearray) -> tuple[int, int]:
    """(H, W) in the header of a PNG."""
    width, height = struct.unpack(">II", content[16:24])
    return height, width


def read_png(content: bytes | bytearray) -> Map:
    """The numbers of a PNG that is grey, of a palette (the places in it) or of red, green and blue; read-only.

    Raises:
        Exception: whatever a broken file leads Pillow to.
    """
    if png_format(content) != (16, RGB):
        return np.asarray(_open(content))
    upper, lower = _open(content), _open(content)
    lower.tile = [tile._replace(args="RGB;16L") for tile in lower.tile]  # as if stored with the lower byte first
    numbers: Map = np.asarray(upper).astype(np.uint16) << 8 | np.asarray(lower)
    return numbers


def _open(content: bytes | bytearray) -> Image.Image:
    return Image.open(io.BytesIO(content), formats=("PNG",))


def write_png(numbers: Map, level: int = 6) -> bytes:
    """A PNG of the map's own bits and channels.

    Args:
        numbers: [H, W] or [H, W, 3], uint8 or uint16.
        level: of zlib.
    """
    if numbers.ndim == 2 or numbers.dtype == np.uint8:
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(numbers)).save(stream, "PNG", compress_level=level)
        return stream.getvalue()
    height, width, _ = numbers.shape
    lines = numbers.astype(">u2").view(np.uint8).reshape(height, -1)  # [H, 6 W]
    differences = lines - np.concatenate([np.zeros_like(lines[:1]), lines[:-1]])  # modulo 256
    filtered = np.concatenate([np.full((height, 1), _UP, dtype=np.uint8), differences], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 16, RGB, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), level)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
