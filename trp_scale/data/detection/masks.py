"""Masks of objects as COCO's run lengths, through pycocotools, which is imported when masks are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.index import DataError

Bits = npt.NDArray[np.uint8]


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


def runs_of(segmentation: object, height: int, width: int, *, where: str) -> bytes:
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
    if isinstance(segmentation, list):
        polygons = [one for one in segmentation if isinstance(one, list) and len(one) >= 6 and len(one) % 2 == 0]
        if any(not isinstance(number, (int, float)) for one in polygons for number in one):
            raise DataError(f"{where}: a polygon holds something else than numbers")
        if not polygons:
            return b""
        found = functions.merge(functions.frPyObjects(polygons, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
        if isinstance(counts, list):
            if sum(counts) != height * width:
                raise DataError(f"{where}: run lengths of {sum(counts)} pixels, {height} x {width} expected")
            found = functions.frPyObjects(segmentation, height, width)
        elif isinstance(counts, str):
            found = {"size": [height, width], "counts": counts.encode()}
        else:
            raise DataError(f"{where}: segmentation.counts is {type(counts).__name__}, a list or a text expected")
    else:
        raise DataError(
            f"{where}: segmentation is neither a list of polygons nor run lengths of size [{height}, {width}]"
        )
    return bytes(found["counts"]) if functions.area(found) > 0 else b""


def decode(runs: bytes, height: int, width: int) -> Bits:
    """[height, width] 0 or 1."""
    bits: Bits = mask_functions().decode({"size": [height, width], "counts": runs})
    return bits


def encode(bits: Bits) -> bytes:
    """The compressed runs of [height, width] 0 or 1."""
    return bytes(mask_functions().encode(np.asfortranarray(bits))["counts"])
