"""ConvNeXt blocks on a grid four times as fine as the patches', as MultiMAE fine-tunes (Bachmann et al. 2022)."""

from __future__ import annotations

from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from trp_scale.downstream.dense.heads.base import DenseHead

FINER = 4
"""Cells along each side of a patch."""

BLOCKS = 4

WIDTH = 384
"""Channels of a cell: a token is projected to 6144 = 16 x 384 values."""


class ConvNextHead(DenseHead):
    """Each token of the last block becomes 4 x 4 cells; timm's ConvNeXt blocks without layer scale (Liu et al. 2022)
    join them, and a linear layer reads each cell.

    Args:
        width: D, of a token.
        outputs: C, channels of the result.
        cell: channels of a cell.
    """

    outputs = ("classifier",)

    def __init__(self, width: int, outputs: int, cell: int = WIDTH) -> None:
        super().__init__()
        self.projection = nn.Linear(width, FINER**2 * cell)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(cell, ls_init_value=None) for _ in range(BLOCKS)))
        self.classifier = nn.Conv2d(cell, outputs, 1)

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """[B, 1 + G^2, D] -> [B, C, 4 G, 4 G]."""
        cells = self.projection(tokens[-1][:, 1:])  # [B, G^2, 16 W]
        return [self.classifier(self.blocks(finer_map(cells)))]


def finer_map(cells: Tensor) -> Tensor:
    """[B, G^2, 16 W] -> [B, W, 4 G, 4 G]: the 16 parts of a token are its cells, row by row."""
    batch, patches, _ = cells.shape
    grid = round(patches**0.5)
    parts = cells.view(batch, grid, grid, FINER, FINER, -1)  # [B, row, column, cell row, cell column, W]
    return parts.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, grid * FINER, grid * FINER)
