"""timm's vision transformer with relative positions: iRPE's contextual product on keys (Wu et al., arXiv:2107.14222).

`trp-scale export --to timm` writes this file as hubconf.py next to config.json and model.safetensors, because timm's
own relative positions do not depend on the query. It needs only torch, timm and safetensors:

    model = torch.hub.load("DIRECTORY", "encoder", source="local")

The score of query i and key j is (q_i . k_j + q_i . r[x_i - x_j]) / sqrt(d). The heads of a block share one table r of
7 x 7 entries, for row and column indices from -3 to 3, and one entry for the class token as a key. A class token as a
query has no bias: a constant bias over its keys would cancel in the softmax.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

dependencies = ["torch", "timm", "safetensors"]
"""Modules that torch.hub requires before it loads."""

ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
"""The index of an offset equals it up to ALPHA, then grows with its logarithm, up to BETA at GAMMA (ratio 1.9)."""

REACH = 3
"""The table has indices from -REACH to REACH."""

SETTLED = 7
"""Integer offsets of this length or more have the last index."""


def encoder(pretrained: bool = True, **arguments: Any) -> VisionTransformer:
    """Return the exported encoder; it has a head only with `num_classes`.

    Args:
        pretrained: load the exported weights; those of a head stay random.
        arguments: arguments of timm's VisionTransformer that replace the exported ones, such as drop_path_rate.

    Raises:
        RuntimeError: the weights do not fit the arguments, such as another img_size.
    """
    directory = Path(__file__).parent
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    pooling = {"num_classes": described["num_classes"], "global_pool": described["global_pool"]}
    model = VisionTransformer(**{**pooling, **described["model_args"], **arguments})
    for block in model.blocks:
        block.attn = RelativeAttention(block.attn, model.patch_embed.grid_size[0], described["relative_index"])
    if pretrained:
        unfilled = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
        wrong = [*unfilled.unexpected_keys, *(name for name in unfilled.missing_keys if "head" not in name)]
        wrong = [name for name in wrong if not name.startswith("fc_norm")]
        if wrong:
            raise RuntimeError(f"{directory}: the weights and the model differ in {', '.join(wrong)}")
    model.pretrained_cfg = described["pretrained_cfg"]
    return model


class RelativeAttention(Attention):  # type: ignore[misc]
    """Attention over [class token, G^2 patches row by row] with a table of relative positions; sizes and dropout are
    those of `plain`. The index relaxed interpolates between entries of the table, rounded uses the nearest entry."""

    pairs: Tensor
    weights: Tensor

    def __init__(self, plain: Attention, grid: int, index: str) -> None:
        super().__init__(plain.qkv.in_features, num_heads=plain.num_heads, qkv_bias=plain.qkv.bias is not None)
        self.attn_drop, self.proj_drop = plain.attn_drop, plain.proj_drop
        self.relative_table = nn.Parameter(
            torch.zeros((2 * REACH + 1) ** 2 + 1, plain.qkv.in_features // self.num_heads)
        )
        self.register_buffer("pairs", pair_indices(grid), persistent=False)  # [T, T]
        self.register_buffer("weights", offset_weights(grid, index), persistent=False)  # [R, 50]

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if attn_mask is not None or is_causal:
            raise ValueError("attention with relative positions takes no mask")
        size = self.relative_table.shape[1]
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.num_heads, size)).permute(2, 0, 3, 1, 4).unbind(0)
        with torch.autocast(x.device.type, enabled=False):
            vectors = self.weights.to(self.relative_table.dtype) @ self.relative_table * size**-0.5  # [R, d]
        products = queries @ vectors.to(queries.dtype).t()  # [B, H, T, R]
        bias = products.gather(-1, self.pairs.expand(*products.shape[:2], -1, -1))  # [B, H, T, T]
        dropout = self.attn_drop.p if self.training else 0.0
        context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, dropout_p=dropout)
        return self.proj_drop(self.proj(context.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def pair_indices(grid: int) -> Tensor:
    """Return the vector number of each pair of query and key, [1 + G^2, 1 + G^2] int64. The last two numbers are for
    the class token as a key, and as a query."""
    most = min(grid - 1, SETTLED)
    span = 2 * most + 1
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    down, across = (
        (axis.flatten()[:, None] - axis.flatten()[None, :]).clamp(-most, most) + most for axis in (rows, columns)
    )
    numbers = F.pad(down * span + across, (1, 0), value=span**2)
    return F.pad(numbers, (0, 0, 1, 0), value=span**2 + 1)


def offset_weights(grid: int, index: str) -> Tensor:
    """Return the weights [R, 50] of the table's entries in each vector: pairs of offsets, then the class token's entry,
    then a zero vector."""
    most = min(grid - 1, SETTLED)
    axis = node_weights(torch.arange(-most, most + 1, dtype=torch.float64), index)  # [P, 7]
    patches = torch.einsum("pi,qj->pqij", axis, axis).flatten(2).flatten(0, 1)  # [P^2, 49]
    padded = F.pad(patches, (0, 1, 0, 2))
    padded[-2, -1] = 1.0
    return padded.float()


def node_weights(offset: Tensor, index: str) -> Tensor:
    """Return the weight of each index for offsets in patches: [P] -> [P, 7]."""
    longer = ALPHA + (offset.abs().clamp(min=ALPHA) / ALPHA).log() * ((BETA - ALPHA) / math.log(GAMMA / ALPHA))
    coordinate = torch.where(offset.abs() <= ALPHA, offset, offset.sign() * longer.clamp(max=BETA)).clamp(-REACH, REACH)
    nodes = torch.arange(-REACH, REACH + 1, dtype=offset.dtype)
    if index == "rounded":
        return (coordinate.round()[:, None] == nodes).to(offset.dtype)
    return (1.0 - (coordinate[:, None] - nodes).abs()).clamp(min=0.0)  # linear between the two nodes around it
