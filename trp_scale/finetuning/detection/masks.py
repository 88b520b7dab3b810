"""Masks of objects as COCO's run lengths, through pycocotools, which believes whatever it is given."""

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
"""Pixels that a polygon's points may lie from the image's corner. pycocotools walks along every edge, and ends the
process where one is much longer or a number is none."""

LONGEST_OUTLINE = 1e7
"""Pixels that all edges of a mask's polygons may have together. pycocotools takes some 40 bytes a pixel, and does not
look whether it got them: 200 edges from one end to the other, in 4 KB, ended the process."""

LONGEST_NUMBER = 60
"""Bits of a run length in text: pixels have 32. One of millions of bits took hours."""


def mask_functions() -> Any:
    """pycocotools.mask.

    Raises:
        RefusedError: it is not installed.
    """
    try:
        from pycocotools import mask
    except ImportError as error:
        raise RefusedError(
            "masks of objects and COCO's metric need `pip install trp-scale[evaluation]` (pycocotools); without it: "
            "Pascal VOC, whose metric needs none"
        ) from error
    return mask


def encode_segmentation(segmentation: object, height: int, width: int, *, where: str) -> bytes:
    """Compressed runs of what a COCO file says of a mask: polygons, run lengths, or compressed ones.

    Args:
        height, width: of the image.
        where: the annotation, for messages.

    Returns:
        The runs; b"" for a mask without an area.

    Raises:
        DataError: it is none of these, or of another size.
    """
    functions = mask_functions()
    if height * width >= 1 << 32:
        raise DataError(f"{where}: an image of {height} x {width} pixels, which has no mask")
    if isinstance(segmentation, list):
        polygons = [xy for xy in segmentation if isinstance(xy, list) and len(xy) >= 6 and len(xy) % 2 == 0]
        if any(not (is_finite(number) and abs(number) <= FARTHEST) for number in chain(*polygons)):
            raise DataError(f"{where}: a polygon holds something else than numbers of pixels, up to {FARTHEST:.0f}")
        if not polygons:
            return b""
        if (outline := sum(map(_outline, polygons))) > LONGEST_OUTLINE:
            raise DataError(
                f"{where}: polygons with an outline of {outline:.0f} pixels, at most {LONGEST_OUTLINE:.0f} are drawn"
            )
        encoded = functions.merge(functions.frPyObjects(polygons, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
        if not isinstance(counts, (list, str)):
            raise DataError(f"{where}: segmentation.counts is {type(counts).__name__}, a list or a text expected")
        lengths = counts if isinstance(counts, list) else _lengths(counts)
        if lengths is None or any(type(length) is not int or not 0 <= length < 1 << 32 for length in lengths):
            raise DataError(f"{where}: segmentation.counts holds something else than run lengths")
        if sum(lengths) != height * width:
            raise DataError(f"{where}: run lengths of {sum(lengths)} pixels, {height} x {width} expected")
        encoded = functions.frPyObjects({"size": [height, width], "counts": lengths}, height, width)
    else:
        raise DataError(
            f"{where}: segmentation is neither a list of polygons nor run lengths of size [{height}, {width}]"
        )
    return bytes(encoded["counts"]) if functions.area(encoded) > 0 else b""


def _outline(polygon: list[float]) -> float:
    """Pixels along all edges of a closed polygon, x and y in turn, as pycocotools counts them."""
    points = np.array(polygon, dtype=np.float64).reshape(-1, 2)
    return float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())


def _lengths(text: str) -> list[int] | None:
    """The run lengths of COCO's text, or None if it is none.

    Each character holds five bits of a number, the lowest first, and a sixth that says that it goes on; from the fourth
    number on they are differences to the number before the last. pycocotools believes any text, and masks of too few
    pixels then end in what the memory held before.
    """
    lengths: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > LONGEST_NUMBER:
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
    """[height, width] 0 or 1."""
    bits: Bits = mask_functions().decode({"size": [height, width], "counts": runs})
    return bits


def encode(bits: Bits) -> bytes:
    """The compressed runs of [height, width] 0 or 1."""
    return bytes(mask_functions().encode(np.asfortranarray(bits))["counts"])


@dataclass(frozen=True, kw_only=True)
class StoredMasks:
    """Masks in COCO's compressed run lengths, one after the other.

    Attributes:
        runs: all bytes.
        ends: [m + 1] where each ends, from 0.
    """

    runs: bytes
    ends: Integers

    def __getitem__(self, number: int) -> bytes:
        return self.runs[self.ends[number] : self.ends[number + 1]]
