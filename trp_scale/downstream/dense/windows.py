"""Whole images as squares of one size, to measure at full resolution: overlapping windows, or one squashed square."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.config import CropsConfig
from trp_scale.data.hashing import Integers
from trp_scale.downstream.dense.settings import DenseConfig


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of one image.

    Attributes:
        images: [K, 3, S, S] uint8.
        corners: [K, 2] top and left of each in the scaled image.
        scaled: height and width of the scaled image.
    """

    images: Tensor
    corners: Integers
    scaled: tuple[int, int]


class WindowCutter:
    """Scales whole images and cuts them into windows of crops.size.

    Args:
        crops: size and interpolation.
        dense: windows or squashed, and the windows' overlap.
    """

    def __init__(self, crops: CropsConfig, dense: DenseConfig) -> None:
        self.size = crops.size
        self._squashed = dense.measured == "squashed"
        self._stride = max(1, int(crops.size * (1 - dense.overlap) + 1e-9))
        self._mode = InterpolationMode[crops.interpolation.upper()]

    def cut(self, image: Tensor) -> Windows:
        """The windows of an image [3, H, W] uint8."""
        size, (height, width) = self.size, image.shape[1:]
        shorter = min(height, width)
        scaled = (size, size) if self._squashed else (round(height * size / shorter), round(width * size / shorter))
        whole = functional.resize(image, list(scaled), interpolation=self._mode, antialias=True)
        corners = [(top, left) for top in self._places(scaled[0]) for left in self._places(scaled[1])]
        cut = [whole[:, top : top + size, left : left + size] for top, left in corners]
        return Windows(images=torch.stack(cut), corners=np.array(corners, dtype=np.int64), scaled=scaled)

    def _places(self, length: int) -> list[int]:
        """Where windows begin along a side: each a stride after the one before, the last one at the end."""
        last = length - self.size
        return [*range(0, last, self._stride), last]
