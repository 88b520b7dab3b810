"""File formats of images and maps: their headers are checked before memory is taken for what they claim.

Images are JPEG; external tars may hold PNG and WebP. Maps are PNG, grey or red, green and blue, of 8 or 16 bits, or
.npy when they come from others. Pillow decodes all but JPEG: torchvision's decoder of PNG ends the process on most
damaged files. Pillow itself has no image of three 16-bit channels, so these are unpacked twice, the upper bytes and
the lower ones. A file of 3 kB can claim 65,535 x 65,535 pixels, which took 6.3 GB and 20 s. Nothing is unpickled.
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
"""Of an image or a map; sharding leaves larger ones out too, unless --max_pixels says otherwise."""

MOST_SCANS = 500
"""Of a progressive JPEG, as libjpeg-turbo's own tools advise; encoders make some 10. Each goes over all pixels: of 100
megapixels one takes 140 bytes and 65 ms, so a file of 1 MB took minutes."""

_SOS, _TEM = 0xDA, 0x01
_WITHOUT_LENGTH = frozenset({_TEM, *range(0xD0, 0xDA)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a JPEG that tell its size: all kinds of frames."""
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})


def refuse_too_many_pixels(height: int, width: int) -> None:
    """Raise DataError for an image of more than MOST_PIXELS."""
    if height * width > MOST_PIXELS:
        raise DataError(
            f"{width} x {height} pixels, at most {MOST_PIXELS} are decoded; shard the images again with --short_side "
            "or --max_pixels"
        )


def refuse_too_many_scans(content: bytes | bytearray) -> None:
    """Raise DataError for a progressive JPEG of more than MOST_SCANS; others have one for each colour."""
    frame = _frame(content)
    if frame is None or content[frame - 1] not in _PROGRESSIVE:
        return  # counting takes as long as a tenth of the decoding
    scans = content.count(bytes((0xFF, _SOS)))
    if scans > MOST_SCANS:
        raise DataError(f"a JPEG of {scans} scans, at most {MOST_SCANS} are decoded; write it anew")


def jpeg_frame_size(content: bytes | bytearray) -> tuple[int, int] | None:
    """(H, W) of a JPEG, read from its markers as libjpeg reads them; None if there is no frame before the pixels.

    Takes 2 us, where opening the file by Pillow takes 60.
    """
    offset = _frame(content)
    if offset is None or len(frame := content[offset : offset + 7]) < 7:
        return None
    return int.from_bytes(frame[3:5], "big"), int.from_bytes(frame[5:7], "big")


def _frame(content: bytes | bytearray) -> int | None:
    """The byte behind the marker of a JPEG's frame."""
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
"""The numbers of a map, [H, W] or [H, W, 3], uint8 or uint16."""

GREY, RGB, PALETTE = 0, 2, 3
"""Colour types of the PNG format."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2
"""The filter that stores each line as its difference from the line above."""


def png_format(content: bytes | bytearray) -> tuple[int, int]:
    """(bits of a channel, colour type) in the header of a PNG; (0, 0) of anything else."""
    if len(content) < 26 or content[:8] != PNG_SIGNATURE:
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
        return np.asarray(_open_png(content))
    upper, lower = _open_png(content), _open_png(content)
    lower.tile = [tile._replace(args="RGB;16L") for tile in lower.tile]  # as if stored with the lower byte first
    numbers: Map = np.asarray(upper).astype(np.uint16) << 8 | np.asarray(lower)
    return numbers


def _open_png(content: bytes | bytearray) -> Image.Image:
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
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


FORMATS = ("PNG", "WEBP")
"""Pillow's names of them. Nothing else is opened: Pillow starts programs for some formats."""


def is_other_format(content: bytes | bytearray) -> bool:
    """Whether a file begins as a PNG or a WebP does, whatever its name says."""
    return content[:8] == PNG_SIGNATURE or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")


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
