"""Where an image lies in its square, and its boxes and masks with it.

Every draw is a hash of the row's state, so a placement depends on (seed, row key, epoch) and on the image's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.ops import roi_align
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.images.crops import uniform

Floats = npt.NDArray[np.float64]

_SCALE = np.uint64(name_hash("detection: scale"))
_TOP = np.uint64(name_hash("detection: top"))
_LEFT = np.uint64(name_hash("detection: left"))
_FLIP = np.uint64(name_hash("detection: flip"))

GREY = 128
"""Value of the pixels of the square that the image does not fill."""

SMALLEST = 1.0
"""Pixels of the square that an object's box has along each side at least; smaller ones are left out."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How an image of size [H, W] gets into a square: mirrored, resized, and then cut or filled up at right and below.

    Attributes:
        size: H, W.
        resized: height and width that it is resized to.
        top, left: first row and column that are shown.
        flip: whether it is mirrored before.
        side: of the square.
    """

    size: tuple[int, int]
    resized: tuple[int, int]
    top: int
    left: int
    flip: bool
    side: int

    @property
    def shown(self) -> tuple[int, int]:
        """Height and width of the part of the square that the image fills."""
        return min(self.side, self.resized[0] - self.top), min(self.side, self.resized[1] - self.left)

    def image(self, image: Tensor, mode: InterpolationMode, out: Tensor) -> None:
        """Draw an image [3, H, W] uint8 into the square `out` [3, side, side]."""
        resized = functional.resize(image, list(self.resized), interpolation=mode, antialias=True)
        if self.flip:
            resized = functional.horizontal_flip(resized)
        height, width = self.shown
        out.fill_(GREY)
        out[:, :height, :width] = resized[:, self.top : self.top + height, self.left : self.left + width]

    def boxes(self, boxes: Floats) -> Floats:
        """[n, 4] left, top, right, bottom in the image -> in the square, cut to what is shown of the image."""
        height, width = (new / old for new, old in zip(self.resized, self.size, strict=True))
        left, right = boxes[:, 0] * width, boxes[:, 2] * width
        if self.flip:
            left, right = self.resized[1] - right, self.resized[1] - left
        bottom, end = self.shown
        placed = np.stack([left - self.left, boxes[:, 1] * height - self.top, right - self.left,
                           boxes[:, 3] * height - self.top], axis=1)  # fmt: skip
        cut: Floats = np.clip(placed, 0.0, [end, bottom, end, bottom])
        return cut

    def sources(self, boxes: Floats) -> Floats:
        """The inverse of `boxes` for boxes that lie in what is shown, [n, 4]."""
        height, width = (new / old for new, old in zip(self.resized, self.size, strict=True))
        left, right = boxes[:, 0] + self.left, boxes[:, 2] + self.left
        if self.flip:
            left, right = self.resized[1] - right, self.resized[1] - left
        found: Floats = np.stack(
            [left / width, (boxes[:, 1] + self.top) / height, right / width, (boxes[:, 3] + self.top) / height], axis=1
        )
        return found

    def mask(self, mask: npt.NDArray[np.uint8], box: Floats, grid: int) -> Tensor:
        """An object's mask within its box.

        Args:
            mask: [H, W] 0 or 1, of the whole image.
            box: [4] of the object in the square.
            grid: cells along each side.

        Returns:
            [grid, grid] uint8, share of each cell that the mask covers, times 255.
        """
        source = torch.from_numpy(self.sources(box[None])).float()  # [1, 4]
        whole = torch.from_numpy(mask).float()[None, None]  # [1, 1, H, W]
        # Without a sampling ratio each cell is the mean over its pixels.
        cells: Tensor = roi_align(whole, [source], (grid, grid), aligned=True)[0, 0]  # [grid, grid]
        return (cells.flip(-1) if self.flip else cells).mul(255.0).round().to(torch.uint8)


def letterbox(sizes: Integers, side: int) -> list[Placement]:
    """Each image whole, its longer side as long as the square's."""
    return [_placed(size, side, 1.0) for size in sizes.tolist()]


def draw_placements(
    states: Words, sizes: Integers, side: int, *, scales: tuple[float, float], flip: float
) -> list[Placement]:
    """Random mirroring and large-scale jitter (Ghiasi et al. 2021).

    Args:
        states: [R] a word per row (`plan.row_states`).
        sizes: [R, 2] height and width of its image.
        side: of the squares.
        scales: the longer side is scaled to `side` times a number drawn from the first to the second.
        flip: probability of mirroring.
    """
    smallest, largest = scales
    ratios = smallest + (largest - smallest) * uniform(mix(states ^ _SCALE))
    flips = uniform(mix(states ^ _FLIP)) < flip
    whole = [
        _placed(size, side, ratio, bool(mirrored))
        for size, ratio, mirrored in zip(sizes.tolist(), ratios.tolist(), flips.tolist(), strict=True)
    ]
    rooms = np.array([[max(length - side, 0) + 1 for length in one.resized] for one in whole], dtype=np.int64)
    tops, lefts = below(mix(states ^ _TOP), rooms[:, 0]), below(mix(states ^ _LEFT), rooms[:, 1])
    return [
        Placement(size=one.size, resized=one.resized, top=int(top), left=int(left), flip=one.flip, side=side)
        for one, top, left in zip(whole, tops, lefts, strict=True)
    ]


def _placed(size: list[int], side: int, ratio: float, flip: bool = False) -> Placement:
    height, width = size
    factor = side * ratio / max(height, width)
    resized = max(1, round(height * factor)), max(1, round(width * factor))
    return Placement(size=(height, width), resized=resized, top=0, left=0, flip=flip, side=side)
