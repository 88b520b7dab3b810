"""What heads that give every pixel a value have in common: which tokens they read, as maps, and how they start."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trp_scale.core.seeds import tensor_seed
from trp_scale.models.initialise import write

NORM_CHANNELS = 16
"""Fewest channels of a group of a group norm: over fewer, values on a 1 x 1 map would be little but their order."""

MOST_GROUPS = 32

OUTPUT_SCALE = 0.01
"""The last layer starts this much smaller, so that all classes start almost equally likely, and depth at its mean."""


class DenseHead(nn.Module):
    """Turns tokens of some blocks into maps.

    Attributes:
        after: numbers of the blocks that are read, ascending, perhaps repeated; empty: the last block's tokens through
            the encoder's norm.
        outputs: names of the last layers.
    """

    after: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Tokens [B, 1 + G^2, D] of each block of `after` -> maps [B, C, H, W]: the prediction, and perhaps that of an
        auxiliary head."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")


def as_map(tokens: Tensor) -> Tensor:
    """Patch tokens without the class token: [B, 1 + G^2, D] -> [B, D, G, G]."""
    batch, length, width = tokens.shape
    grid = math.isqrt(length - 1)
    return tokens[:, 1:].transpose(1, 2).reshape(batch, width, grid, grid)


def quarters(blocks: int) -> tuple[int, ...]:
    """The last block of each quarter of an encoder: 2, 5, 8, 11 of 12; some repeat if there are fewer than four."""
    return tuple(-(-quarter * blocks // 4) - 1 for quarter in (1, 2, 3, 4))


def group_norm(channels: int) -> nn.GroupNorm:
    """A group norm of at most 32 groups. It normalises each image by itself; a batch norm would make an image's result
    depend on how the batch is split over ranks and micro-batches, and its running statistics are no parameters, so no
    checkpoint would hold them."""
    groups = max(1, min(MOST_GROUPS, channels // NORM_CHANNELS))
    while channels % groups:
        groups -= 1
    return nn.GroupNorm(groups, channels)


def without_batch_norms(module: nn.Module) -> None:
    """Put a group norm in the place of every batch norm, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, group_norm(child.num_features))
        else:
            without_batch_norms(child)


def initialise_head(head: DenseHead, *, seed: int) -> None:
    """Initial weights from (seed, name): matrices and kernels uniform within fan_in^(-1/2), as torch's own layers,
    those of the last layers scaled by OUTPUT_SCALE; biases 0, norm weights 1."""
    fans = {name: _fan_in(module) for name, module in head.named_modules()}

    def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
        layer, _, kind = name.rpartition(".")
        if parameter.ndim < 2:
            return 1.0 if kind == "weight" else 0.0
        generator = torch.Generator().manual_seed(tensor_seed(seed, f"head.{name}"))
        bound = math.sqrt(1.0 / fans[layer]) * (OUTPUT_SCALE if layer in head.outputs else 1.0)
        return (2.0 * torch.rand(tuple(parameter.shape), generator=generator) - 1.0) * bound

    write(head, rule)


def _fan_in(module: nn.Module) -> int:
    """Inputs of each output of a layer; 0 of others."""
    if isinstance(module, nn.ConvTranspose2d):  # its strides are its kernel's sides: kernels do not overlap
        return module.in_channels
    if isinstance(module, nn.Conv2d):
        return module.in_channels // module.groups * math.prod(module.kernel_size)
    return module.in_features if isinstance(module, nn.Linear) else 0
