"""File formats of images and maps. Headers are checked before memory is allocated for the size that they claim.

Images are JPEG; external tars may hold PNG and WebP. Maps are grey or RGB PNG of 8 or 16 bits; shard-images also reads
.npy. Pillow decodes all but JPEG, because torchvision's PNG decoder ends the process on most damaged files. Pillow has
no image mode with three 16-bit channels: these are decoded twice, for the upper and the lower bytes. A file of 3 kB can
claim 65,535 x 65,535 pixels, which took 6.3 GB and 20 s. Nothing is unpickled.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trp_scale.errors import DataError

MOST_PIXELS = 100_000_000
"""Limit of pixels of an image or a map; sharding skips larger ones too, unless --max_pixels is set."""

MOST_SCANS = 500
"""Limit of scans of a progressive JPEG, as in libjpeg-turbo's own tools; encoders write about 10. A scan passes over
all pixels: at 100 megapixels it takes 140 bytes and 65 ms, so that a file of 1 MB took minutes."""

_SOS, _TEM = 0xDA, 0x01
_WITHOUT_LENGTH = frozenset({_TEM, *range(0xD0, 0xDA)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start-of-frame markers of a JPEG, which hold its size."""
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})


def refuse_too_many_pixels(height: int, width: int) -> None:
    """Raise DataError for an image of more than MOST_PIXELS."""
    if height * width > MOST_PIXELS:
        raise DataError(
            f"{width} x {height} pixels, at most {MOST_PIXELS} are decoded; shard the images again with --short_side "
            "or --max_pixels"
        )


def refuse_too_many_scans(content: bytes | bytearray) -> None:
    """Raise DataError for a progressive JPEG of more than MOST_SCANS; other JPEGs have one scan for each colour."""
    frame = _frame(content)
    if frame is None or content[frame - 1] not in _PROGRESSIVE:
        return  # counting takes a tenth of the decoding time
    scans = content.count(bytes((0xFF, _SOS)))
    if scans > MOST_SCANS:
        raise DataError(f"a JPEG of {scans} scans, at most {MOST_SCANS} are decoded; encode it again")


def jpeg_frame_size(content: bytes | bytearray) -> tuple[int, int] | None:
    """Read (H, W) from the markers of a JPEG, like libjpeg; `None` if no frame precedes the pixels.

    It takes 2 us; opening the file with Pillow takes 60 us.
    """
    offset = _frame(content)
    if offset is None or len(frame := content[offset : offset + 7]) < 7:
        return None
    return int.from_bytes(frame[3:5], "big"), int.from_bytes(frame[5:7], "big")


def _frame(content: bytes | bytearray) -> int | None:
    """Return the offset after the marker of a JPEG's frame."""
    offset, end = 2, len(content)
    if content[:2] != b"\xff\xd8":
        return None
    while 0 <= (offset := content.find(0xFF, offset)) < end - 1:
        marker = content[offset + 1]
        if marker == 0xFF:  # fill bytes
            offset += 1
            continue
        offset += 2
        if marker == 0 or marker in _WITHOUT_LENGTH:
            continue
        if marker == _SOS:
            return None
        if marker in _FRAMES:
            return offset
        offset += int.from_bytes(content[offset : offset + 2], "big")
    return None


Map = npt.NDArray[Any]
"""Pixels of a map, [H, W] or [H, W, 3], uint8 or uint16."""

GREY, RGB, PALETTE = 0, 2, 3
"""Colour types of the PNG format."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2
"""PNG filter that stores the difference of each line from the line above."""


def png_format(content: bytes | bytearray) -> tuple[int, int]:
    """Read (bits per channel, colour type) from the header of a PNG; (0, 0) for other files."""
    if len(content) < 26 or content[:8] != PNG_SIGNATURE:
        return 0, 0
    return content[24], content[25]


def png_size(content: bytes | bytearray) -> tuple[int, int]:
    """Read (H, W) from the header of a PNG."""
    width, height = struct.unpack(">II", content[16:24])
    return height, width


def read_png(content: bytes | bytearray) -> Map:
    """Decode a PNG with grey, palette (as indices) or RGB pixels; read-only.

    Raises:
        Exception: Pillow raises many types on a damaged file.
    """
    if png_format(content) != (16, RGB):
        return np.asarray(_open_png(content))
    upper, lower = _open_png(content), _open_png(content)
    lower.tile = [tile._replace(args="RGB;16L") for tile in lower.tile]  # as if stored with the lower byte first
    numbers: Map = np.asarray(upper).astype(np.uint16) << 8 | np.asarray(lower)
    return numbers


def _open_png(content: bytes | bytearray) -> Image.Image:
    return Image.open(io.BytesIO(content), formats=("PNG",))


def write_png(numbers: Map, level: int = 6) -> bytes:
    """Encode a map as PNG with its own bits and channels.

    Args:
        numbers: [H, W] or [H, W, 3], uint8 or uint16.
        level: compression level of zlib.
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
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


FORMATS = ("PNG", "WEBP")
"""Formats that Pillow may open; for some others it starts programs."""


def is_other_format(content: bytes | bytearray) -> bool:
    """Whether a file has the signature of a PNG or a WebP."""
    return content[:8] == PNG_SIGNATURE or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")


def decode_other_format(content: bytes | bytearray) -> npt.NDArray[np.uint8]:
    """Decode a PNG or WebP, [H, W, 3]; transparent pixels become white.

    Raises:
        DataError: more than MOST_PIXELS.
        Exception: Pillow raises many types on a damaged file.
    """
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        refuse_too_many_pixels(image.height, image.width)
        pixels: npt.NDArray[np.uint8] = np.array(as_rgb(image))
    return pixels


class UnknownRangeError(ValueError):
    """The range of an image's 32-bit pixels is unknown."""


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit RGB; transparent pixels become white.

    Raises:
        UnknownRangeError: 32-bit pixels.
    """
    if image.mode in ("I", "F"):
        raise UnknownRangeError(f"pixels of mode {image.mode}, with an unknown range")
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 257).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        flat: Any = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = flat
    return image.convert("RGB")
