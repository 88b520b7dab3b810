"""Images as sequences of patches."""

from __future__ import annotations

from torch import Tensor


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """[B, C, S, S] -> [B, N, P]: N = (S / patch_size)^2 patches row by row, P = patch_size^2 C values of each in the
    order (row, column, channel), as in He et al.'s target."""
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
    """[B, N, P] at [B, M] -> [B, M, P]."""
    return patches.gather(1, numbers.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
