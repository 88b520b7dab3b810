"""Object masks as COCO's run lengths, through pycocotools, which does not validate its input."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.config.schema import is_finite
from trp_scale.data.hashing import Integers
from trp_scale.errors import DataError

Bits = npt.NDArray[np.uint8]

FARTHEST = 1e6
"""Largest coordinate of a polygon in pixels. pycocotools crashes on much longer edges and on non-finite numbers."""

LONGEST_OUTLINE = 1e7
"""Largest total length of a mask's polygon edges in pixels. pycocotools allocates about 40 bytes per pixel unchecked:
200 edges across the image, in 4 KB, crashed the process."""


def mask_functions() -> Any:
    """Import pycocotools.mask."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise RefusedError(
            "masks and COCO's metric need pycocotools; run `pip install trp-scale[evaluation]`, or use Pascal VOC, "
            "whose metric does not need it"
        ) from error
    return mask


def encode_segmentation(segmentation: object, height: int, width: int, *, where: str) -> bytes:
    """Return compressed run lengths for a COCO mask of polygons, run lengths or compressed run lengths.

    Masks without an area give b"".

    Raises:
        DataError: the mask is of another format or size.
    """
    functions = mask_functions()
    if height * width >= 1 << 32:
        raise DataError(f"{where}: the image has {height} x {width} pixels; masks allow fewer than 2^32")
    if isinstance(segmentation, list):
        polygons = [xy for xy in segmentation if isinstance(xy, list) and len(xy) >= 6 and len(xy) % 2 == 0]
        if any(not (is_finite(number) and abs(number) <= FARTHEST) for number in chain(*polygons)):
            raise DataError(f"{where}: invalid coordinate in a polygon; allowed: finite numbers up to {FARTHEST:.0f}")
        if not polygons:
            return b""
        # Pixels along all edges of the closed polygons x, y, x, y, ..., as pycocotools counts
        points = [np.array(polygon, dtype=np.float64).reshape(-1, 2) for polygon in polygons]
        outline = sum(float(np.abs(xy - np.roll(xy, 1, axis=0)).max(axis=1).sum()) for xy in points)
        if outline > LONGEST_OUTLINE:
            raise DataError(
                f"{where}: polygons with an outline of {outline:.0f} pixels; allowed: at most {LONGEST_OUTLINE:.0f}"
            )
        encoded = functions.merge(functions.frPyObjects(polygons, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
        if not isinstance(counts, (list, str)):
            raise DataError(f"{where}: segmentation.counts is {type(counts).__name__}, a list or a text expected")
        lengths = counts if isinstance(counts, list) else _lengths(counts)
        if lengths is None or any(type(length) is not int or not 0 <= length < 1 << 32 for length in lengths):
            raise DataError(f"{where}: invalid run length in segmentation.counts; expected: numbers of pixels")
        if sum(lengths) != height * width:
            raise DataError(f"{where}: run lengths of {sum(lengths)} pixels, {height} x {width} expected")
        encoded = functions.frPyObjects({"size": [height, width], "counts": lengths}, height, width)
    else:
        raise DataError(
            f"{where}: segmentation is neither a list of polygons nor run lengths of size [{height}, {width}]"
        )
    return bytes(encoded["counts"]) if functions.area(encoded) > 0 else b""


def _lengths(text: str) -> list[int] | None:
    """Decode COCO's compressed run lengths; `None` if the text is invalid.

    Each character has five bits of a number, lowest first, and a continuation bit. From the fourth number on, a number
    is the difference to the number two before. pycocotools accepts any text, and reads uninitialised memory for masks
    of too few pixels.
    """
    lengths: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:  # pixel counts have 32 bits; decoding millions of bits took hours
            return None
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            number -= 1 << shift
        lengths.append(number + lengths[-2] if len(lengths) > 2 else number)
        number = shift = 0
    return lengths if shift == 0 else None


def decode(runs: bytes, height: int, width: int) -> Bits:
    """Return the mask [height, width], 0 or 1."""
    bits: Bits = mask_functions().decode({"size": [height, width], "counts": runs})
    return bits


def encode(bits: Bits) -> bytes:
    """Return compressed run lengths of a mask [height, width], 0 or 1."""
    return bytes(mask_functions().encode(np.asfortranarray(bits))["counts"])


@dataclass(frozen=True, kw_only=True)
class StoredMasks:
    """Concatenated COCO run lengths of m masks.

    Attributes:
        runs: all bytes.
        ends: [m + 1] offsets in `runs`.
    """

    runs: bytes
    ends: Integers

    def __getitem__(self, number: int) -> bytes:
        return self.runs[self.ends[number] : self.ends[number + 1]]
