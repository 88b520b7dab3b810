"""Relative positions: iRPE's contextual product on keys (Wu et al.), with AdPE's relaxed index (AdPE 4.2).

The score of query i and key j gains scale x q_i . r[offset x_i - x_j]. A block's heads share one table of 49 entries,
7 per axis, and one more for the class token. Queries meet the table first, and what comes out is interpolated: from
7 x 7 entries to every offset of the grid by two small matrix products, from there to the pairs by one lookup. Rounded
and relaxed indices differ in those matrices alone, and a perturbed coordinate costs the forward pass nothing.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
"""Offsets up to ALPHA keep their own entry, longer ones share by their logarithm, and end at BETA (ratio 1.9)."""

REACH = 3
"""Entries of the table go from -REACH to REACH on each axis: floor(BETA)."""

NODES = 2 * REACH + 1

BUCKETS = NODES**2 + 1
"""Rows of the table; node (row, column) is NODES (row + REACH) + column + REACH, the last is the class token's."""

IndexKind = Literal["rounded", "relaxed", "straight_through"]


class RelativeInputs(NamedTuple):
    """What a block's relative positions need beside its queries. Tokens are [class, visible, masked].

    Attributes:
        offsets: [B, K, K] int64, of patches i and j: which of the grid's (2G-1)^2 offsets x_i - x_j is.
        weights: [2, 2G-1, 7], how each offset (row, column axis) is made up of the table's nodes.
        masked: the last so many queries see the following instead, where given.
        masked_weights: [2, 2G-1, 7].
        masked_table: [50, D / H] or [1, D / H], added to the table.
    """

    offsets: Tensor
    weights: Tensor
    masked: int
    masked_weights: Tensor | None = None
    masked_table: Tensor | None = None


def relaxed_index(offset: Tensor) -> Tensor:
    """g~ of AdPE 4.2.3: the offset itself up to ALPHA, then growing with its logarithm, up to BETA."""
    beyond = offset.abs().clamp(min=ALPHA)  # clamped, so that no infinite slope meets the 0 of the branch not taken
    grown = ALPHA + (beyond / ALPHA).log() * ((BETA - ALPHA) / math.log(GAMMA / ALPHA))
    return torch.where(offset.abs() <= ALPHA, offset, offset.sign() * grown.clamp(max=BETA))


def node_weights(offset: Tensor, index: IndexKind) -> Tensor:
    """How an offset is made up of the 7 nodes of an axis, which are -3..3; at most two of them take part.

    rounded: the nearest one. relaxed: the two around the index, which is clamped to the table, so that no gradient
    comes back from beyond. straight_through: the nearest one, with the gradient of relaxed.

    Args:
        offset: [...] in patches, fp32 or fp64; differentiable but for rounded.
    Returns:
        [..., 7], which sum to one.
    """
    clamped = relaxed_index(offset).clamp(-REACH, REACH).unsqueeze(-1)  # [..., 1]
    nodes = torch.arange(-REACH, REACH + 1, device=offset.device)
    nearest = (clamped.round() == nodes).to(offset.dtype)
    if index == "rounded":
        return nearest
    lower = clamped.floor().clamp(max=REACH - 1)  # the last cell holds its upper node: nothing outside is touched
    upper_share = clamped - lower
    relaxed = torch.where(nodes == lower, 1 - upper_share, torch.where(nodes == lower + 1, upper_share, 0.0))
    return relaxed if index == "relaxed" else nearest + (relaxed - relaxed.detach())


def grid_weights(grid: int, index: IndexKind, shift: Tensor) -> Tensor:
    """[..., 2, 2G-1, 7] `node_weights` of all offsets -(G-1)..G-1 of a grid.

    Args:
        shift: [..., 2] added to the row and the column offset, in patches.
    """
    offsets = torch.arange(1 - grid, grid, dtype=shift.dtype, device=shift.device)
    return node_weights(offsets + shift.unsqueeze(-1), index)


def offset_numbers(patches: Tensor, grid: int) -> Tensor:
    """[B, K] patch numbers -> [B, K, K] int64: the number of the offset x_i - x_j, columns first."""
    span = 2 * grid - 1
    rows, columns = patches // grid, patches % grid  # [B, K]
    between_rows = rows.unsqueeze(2) - rows.unsqueeze(1) + grid - 1  # [B, K, K]
    between_columns = columns.unsqueeze(2) - columns.unsqueeze(1) + grid - 1
    return between_columns * span + between_rows


class RelativePositions(nn.Module):
    """The table of one block, zero at the start, and the bias that it gives to attention scores.

    Args:
        head_size: D / H.
    """

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(BUCKETS, head_size))
        self.scale = head_size**-0.5

    def forward(self, queries: Tensor, relative: RelativeInputs) -> Tensor:
        """The bias of the last Q tokens as queries: what attention adds to its scaled scores.

        Args:
            queries: [B, H, Q, D / H]; Q is all K + 1 tokens, or no more than the masked ones.
            relative: see there.
        Returns:
            [B, H, Q, K + 1]. The class token's own row is zero: all its keys share one entry, which cancels in the
            softmax.
        """
        count, patches = queries.shape[2], relative.offsets.shape[1]
        rows = min(count, patches)
        offsets = relative.offsets[:, -rows:]  # [B, rows, K]
        queries = queries[:, :, -rows:]
        if relative.masked_weights is None and relative.masked_table is None:
            biases = [self.bias(queries, self.table, relative.weights, offsets)]
        else:
            clean = rows - relative.masked
            table = self.table if relative.masked_table is None else self.table + relative.masked_table
            weights = relative.weights if relative.masked_weights is None else relative.masked_weights
            biases = [self.bias(queries[:, :, clean:], table, weights, offsets[:, clean:])]
            if clean:
                biases.insert(0, self.bias(queries[:, :, :clean], self.table, relative.weights, offsets[:, :clean]))
        bias = torch.cat(biases, dim=2)  # [B, H, rows, K + 1]
        return F.pad(bias, (0, 0, 1, 0)) if count > patches else bias

    def bias(self, queries: Tensor, table: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """[B, H, Q, D / H] queries of patches and [B, Q, K] -> [B, H, Q, 1 + K]."""
        entries = F.linear(queries, (table * self.scale).to(queries.dtype))  # [B, H, Q, 50]
        row_weights, column_weights = weights.to(entries.dtype).unbind(0)  # [2G-1, 7]
        nodes = entries[..., :-1].reshape(*entries.shape[:-1], NODES, NODES)  # [B, H, Q, row, column]
        columns = F.linear(nodes, column_weights).transpose(-1, -2)  # [B, H, Q, 2G-1, row]
        grid = F.linear(columns, row_weights).flatten(-2)  # [B, H, Q, (2G-1)^2]
        pairs = offsets.unsqueeze(1).expand(-1, queries.shape[1], -1, -1)
        return torch.cat([entries[..., -1:], grid.gather(-1, pairs)], dim=-1)
