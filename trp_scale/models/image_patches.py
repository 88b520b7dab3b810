"""Images as the patches that a masked autoencoder sees and predicts (He et al.)."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.models.patches import patchify

CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_DEVIATION = (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's pixels in [0, 1]. They are taken out of what enters a model, as is usual."""

TARGET_EPS = 1e-6
"""Added to a patch's variance before its root is taken (He et al.)."""


class ImagePatches:
    """Bytes into patches of normalised pixels.

    Args:
        patch_size: side of a patch in pixels.
    """

    def __init__(self, patch_size: int) -> None:
        self.patch_size = patch_size
        self._statistics = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION])  # [2, 3]

    def __call__(self, images: Tensor, shift: Tensor | None = None) -> Tensor:
        """[B, 3, S, S] uint8 -> [B, N, P] float32, of images in [0, 1] with `shift` added."""
        pixels = images.float() / 255.0
        if shift is not None:
            pixels = pixels + shift
        if self._statistics.device != images.device:
            self._statistics = self._statistics.to(images.device)
        mean, deviation = self._statistics.view(2, 1, 3, 1, 1)
        return patchify((pixels - mean) / deviation, self.patch_size)


def normalised(patches: Tensor) -> Tensor:
    """[..., P]: each patch without its own mean and deviation."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + TARGET_EPS).sqrt()
