"""Fixed two-dimensional sine-cosine positions (He et al., from Vaswani et al.), and their shift by a real distance."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 10000.0

PositionOrder = Literal["column_row", "row_column"]
"""Which coordinate the first half of the width encodes, and which the second."""


def frequencies(width: int, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """[width / 4] angles per patch, from 1 down to almost 1 / TEMPERATURE."""
    quarter = width // 4
    return TEMPERATURE ** (-torch.arange(quarter, dtype=dtype, device=device) / quarter)


def sine_cosine(grid: int, width: int, order: PositionOrder = "column_row") -> Tensor:
    """[grid^2, width] float64, positions of a square grid's patches, row by row.

    One half of the width encodes the column, the other the row, each as sines and then cosines.

    Args:
        order: column_row is that of He et al.'s published weights, row_column that of MoCo v3's and MultiMAE's.

    Raises:
        ValueError: width is no multiple of 4.
    """
    if width % 4:
        raise ValueError(f"sine-cosine positions of width {width}: allowed are multiples of 4")
    places = torch.arange(grid, dtype=torch.float64)
    angles = places[:, None] * frequencies(width, dtype=torch.float64)  # [G, width / 4]
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)  # [G, width / 2]
    columns = axis.repeat(grid, 1)  # [G^2, width / 2]
    rows = axis.repeat_interleave(grid, dim=0)
    return torch.cat([columns, rows] if order == "column_row" else [rows, columns], dim=-1)


def shift_positions(positions: Tensor, shift: Tensor, order: PositionOrder = "column_row") -> Tensor:
    """Positions at (row, column) + shift (AdPE 4.1.2), in fp32 at least.

    A shift turns each pair of sine and cosine by shift x frequency, whatever the coordinates: no sine is taken per
    position, and a shift of zero changes nothing at all.

    Args:
        positions: [..., D] from `sine_cosine`, with the same order.
        shift: [2] row and column, in patches; differentiable.
    """
    dtype = torch.promote_types(positions.dtype, torch.float32)
    width = positions.shape[-1]
    halves = positions.to(dtype).reshape(
        *positions.shape[:-1], 2, 2, width // 4
    )  # [..., coordinate, sine | cosine, D / 4]
    sine, cosine = halves.unbind(-2)  # [..., 2, D / 4]
    along = shift.to(dtype) if order == "row_column" else shift.to(dtype).flip(0)  # [2], in the order of the halves
    turn = along[:, None] * frequencies(width, dtype=dtype, device=positions.device)  # [2, D / 4]
    turned = (sine * turn.cos() + cosine * turn.sin(), cosine * turn.cos() - sine * turn.sin())
    return torch.stack(turned, dim=-2).flatten(-3)


class RowsOf(torch.autograd.Function):
    """Rows of a small table that many ask for. The table's gradient is one matrix product, with who asked for which
    row; that of indexing sorts the places."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, places: Tensor) -> Tensor:
        """[N, D] and [...] int64 -> [..., D]."""
        ctx.save_for_backward(places)
        ctx.rows = len(table)
        return table[places]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        asked = places.flatten().unsqueeze(1) == torch.arange(ctx.rows, device=places.device)  # [..., N]
        return asked.to(gradient.dtype).T @ gradient.flatten(0, -2), None


def interpolate(positions: Tensor, grid: int) -> Tensor:
    """[1 + H^2, D] positions of a square grid -> [1 + grid^2, D], bicubically and antialiased as in timm;
    the class token's stay."""
    old = round((len(positions) - 1) ** 0.5)
    if old == grid:
        return positions
    patches = positions[1:].float().view(1, old, old, -1).permute(0, 3, 1, 2)  # [1, D, H, H]
    patches = F.interpolate(patches, size=(grid, grid), mode="bicubic", antialias=True)
    return torch.cat([positions[:1], patches.permute(0, 2, 3, 1).flatten(0, 2).to(positions.dtype)])
