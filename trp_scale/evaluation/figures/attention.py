"""Where a block looks: attention maps of an image at some positions, and averaged over images (AdPE D)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.models.image_encoder import ImageEncoder
from trp_scale.models.relative_positions import RelativeInputs
from trp_scale.models.vit import TransformerBlock

Position = tuple[int, int]
"""Row and column of a patch."""


def attention_weights(block: TransformerBlock, tokens: Tensor, relative: RelativeInputs | None) -> Tensor:
    """softmax(Q K^T / sqrt(D / H) + bias), which the block itself never holds.

    Args:
        block: without gradients.
        tokens: [B, T, D] that enter it.
        relative: as the block has it; its bias is that of AdPE 4.2.

    Returns:
        [B, H, T, T] fp32: row i is what token i looks at; sums to one.
    """
    queries, keys, _ = (
        part.unflatten(-1, (block.heads, -1)).transpose(1, 2)
        for part in block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
    )  # [B, H, T, D / H]
    scores = queries.float() @ keys.float().transpose(-1, -2) * queries.shape[-1] ** -0.5
    if block.relative_positions is not None:
        scores = scores + block.relative_positions(queries, relative).float()
    return torch.softmax(scores, dim=-1)


@contextmanager
def recorded_attention(encoder: ImageEncoder, number: int) -> Iterator[list[Tensor]]:
    """Append the patch attention of one block to the list at each encoder pass inside this context.

    Yields:
        of each pass [B, N, N] fp32, the mean over heads: row i is what patch i looks at. The class token is left out,
        so rows sum to at most one.
    """
    maps: list[Tensor] = []

    def record(block: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(block, TransformerBlock)
        with torch.no_grad():
            maps.append(attention_weights(block, *arguments).mean(1)[:, 1:, 1:])

    handle = encoder.blocks[number].register_forward_pre_hook(record)
    try:
        yield maps
    finally:
        handle.remove()


def mean_distance(attention: Tensor) -> float:
    """Mean distance between a patch and what it looks at, in patches, over all of them.

    Args:
        attention: [N, N] over patches; each row counts as one whatever goes to the class token.
    """
    grid = round(attention.shape[0] ** 0.5)
    places = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).double()  # [N, 2]
    shares = attention.double() / attention.double().sum(1, keepdim=True)
    return float((shares * torch.cdist(places, places)).sum(1).mean())


def default_positions(grid: int) -> list[Position]:
    """Three by three places (row, column) over the grid; of a small grid all that there are."""
    along = sorted({grid // 6, grid // 2, grid - 1 - grid // 6})
    return [(row, column) for row in along for column in along]
