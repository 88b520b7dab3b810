"""How many pixels an image may have, seen in its header before anything is decoded: a file of 3 kB can say 65,535 x
65,535 pixels, which took 6.3 GB and 20 s."""

from __future__ import annotations

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
    place = _frame(content)
    if place is None or len(frame := content[place : place + 7]) < 7:
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
