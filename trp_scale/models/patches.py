"""Images as sequences of patches (He et al.)."""

from __future__ import annotations

import torch
from torch import Tensor


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """[B, C, S, S] -> [B, N, P]: N = (S / patch_size)^2 patches row by row, each with P = patch_size^2 C values in the
    order (row, column, channel), as in He et al."""
    rows, channels, side, _ = images.shape
    grid = side // patch_size
    cut = images.reshape(rows, channels, grid, patch_size, grid, patch_size)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(rows, grid * grid, patch_size * patch_size * channels)


def unpatchify(patches: Tensor, patch_size: int) -> Tensor:
    """[B, N, P] -> [B, C, S, S], the inverse of `patchify`."""
    rows, count, values = patches.shape
    grid, channels = round(count**0.5), values // patch_size**2
    cut = patches.reshape(rows, grid, grid, patch_size, patch_size, channels)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(rows, channels, grid * patch_size, grid * patch_size)


def gather_patches(patches: Tensor, numbers: Tensor) -> Tensor:
    """Return the patches of these numbers: [B, N, P] and [B, M] -> [B, M, P]."""
    return patches.gather(1, numbers.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))


CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_DEVIATION = (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's pixels in [0, 1], which normalise the input of models."""

TARGET_EPS = 1e-6
"""Added to a patch's variance (He et al.)."""


class Pixels:
    """Conversion of bytes to normalised pixels."""

    def __init__(self) -> None:
        self._kept = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION])  # [2, 3]

    def __call__(self, images: Tensor, shift: Tensor | None = None) -> Tensor:
        """[B, 3, S, S] uint8 -> float32: add `shift` in [0, 1], then normalise with ImageNet's mean and deviation."""
        pixels = images.float() / 255.0
        if shift is not None:
            pixels = pixels + shift
        mean, deviation = self._statistics(images.device).view(2, 1, 3, 1, 1)
        normalised: Tensor = (pixels - mean) / deviation
        return normalised

    def _statistics(self, device: torch.device) -> Tensor:
        """Return mean and deviation [2, 3] on the device without a copy at each call, which would synchronise."""
        if torch.compiler.is_compiling():  # a cached tensor would need a second graph after it has moved
            filled = [torch.full((), value, device=device) for value in (*CHANNEL_MEAN, *CHANNEL_DEVIATION)]
            return torch.stack(filled).view(2, 3)
        if self._kept.device != device:
            self._kept = self._kept.to(device)
        return self._kept


class ImagePatches:
    """Conversion of bytes to patches of normalised pixels; `patch_size` is the side of a patch in pixels."""

    def __init__(self, patch_size: int) -> None:
        self.patch_size = patch_size
        self._pixels = Pixels()

    def __call__(self, images: Tensor, shift: Tensor | None = None) -> Tensor:
        """[B, 3, S, S] uint8 -> [B, N, P] float32; `shift` is added to pixels in [0, 1]."""
        return patchify(self._pixels(images, shift), self.patch_size)


def normalise_patches(patches: Tensor) -> Tensor:
    """Normalise each patch [..., P] by its mean and deviation."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + TARGET_EPS).sqrt()
