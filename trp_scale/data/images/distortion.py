"""Photometric distortion of training images: brightness, contrast, saturation and hue, each with probability 1/2 (SSD,
Liu et al. 2016; order and ranges of MMSegmentation).

MMSegmentation rounds down to bytes after each change, and its hues are bytes in steps of two degrees. Here only the
result is rounded, to the nearest byte; the angles are the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from trp_scale.data.hashing import Words, mix, name_hash
from trp_scale.data.images.crops import uniform

_DISTORTION = np.uint64(name_hash("distortion"))

NONE = (0.0, 1.0, 1.0, 0.0)
"""Brightness, added to bytes; factors of contrast and of saturation; hue in steps of two degrees."""
LOWEST, HIGHEST = (-32.0, 0.5, 0.5, -18.0), (32.0, 1.5, 1.5, 18.0)
"""Limits of these four. The hue is rounded down, so that 18 steps do not occur."""


def draw_distortions(states: Words) -> npt.NDArray[np.float64]:
    """Draw from the states [R] of rows (`plan.row_states`) their distortions [R, 5]: the four values of NONE, and 1 if
    contrast comes last, else 0."""
    shares = uniform(mix(mix(states ^ _DISTORTION)[:, None] ^ np.arange(9, dtype=np.uint64)))  # [R, 9]
    values = np.add(LOWEST, np.subtract(HIGHEST, LOWEST) * shares[:, :4])
    values[:, 3] = np.floor(values[:, 3])
    values = np.where(shares[:, 4:8] < 0.5, values, NONE)
    return np.concatenate([values, shares[:, 8:] < 0.5], axis=1)


def distort(image: Tensor, distortion: npt.NDArray[np.float64]) -> Tensor:
    """Return an image [3, H, W] uint8 after a distortion [5] of `draw_distortions`."""
    brightness, contrast, saturation, hue, contrast_last = distortion.tolist()
    pixels: Tensor = (image.float() + brightness).clamp(0, 255)
    if not contrast_last:
        pixels = (pixels * contrast).clamp(0, 255)
    if saturation != 1:
        # At a fixed hue and value, distances from the largest channel are proportional to the saturation, at most 1.
        largest = pixels.amax(0)
        extent = largest - pixels.amin(0)
        factor = torch.where(extent > 0, largest / extent.clamp(min=1e-6), 1.0).clamp(max=saturation)
        pixels = largest - (largest - pixels) * factor
    if hue:
        pixels = 255 * functional.adjust_hue(pixels / 255, hue / 180)
    if contrast_last:
        pixels = (pixels * contrast).clamp(0, 255)
    return pixels.round().to(torch.uint8)
