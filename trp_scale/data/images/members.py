"""The members that an image sample may have. Nothing else is ever opened."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

MODALITIES = {"depth": "depth.png", "semseg": "semseg.png"}
"""Suffix of each aligned modality: 16-bit depth; 8 bits, one class a pixel."""

SUFFIXES = ("jpg", "cls", *MODALITIES.values())
"""Members that a sample may have (cls: an ASCII integer); every sample of a data set has the same ones."""

NOT_MEASURED = 0
"""In a depth map: nothing was measured there."""

VOID = 255
"""In a segmentation map: no class. Classes have numbers below it."""

MAP_BITS = {"depth.png": 16, "semseg.png": 8}
"""Bits of a number in a stored map, a grey PNG."""

GREY_PNG, PALETTE_PNG = 0, 3
"""Colour types of the PNG format."""

Map = npt.NDArray[Any]
"""[H, W] of a modality: uint16 depth, uint8 classes."""


def ordered_suffixes(found: Collection[str]) -> tuple[str, ...]:
    """The suffixes in the order of SUFFIXES."""
    return tuple(suffix for suffix in SUFFIXES if suffix in found)


def png_format(content: bytes | bytearray) -> tuple[int, int]:
    """(bits of a channel, colour type) in the header of a PNG; (0, 0) of anything else."""
    if len(content) < 26 or content[:8] != b"\x89PNG\r\n\x1a\n":
        return 0, 0
    return content[24], content[25]


def unlisted_class(numbers: Map, classes: int) -> int | None:
    """A number of a segmentation map that is neither one of so many classes nor void; None if there is none."""
    wrong = (numbers >= classes) & (numbers != VOID)
    return int(numbers[np.unravel_index(wrong.argmax(), wrong.shape)]) if wrong.any() else None
