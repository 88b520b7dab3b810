"""Where a block looks: attention maps of an image at some positions, and averaged over images (AdPE D), as numbers and
pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trp_scale.evaluation.figures.drawing import DPI, show_image, small_axes
from trp_scale.models.image_encoder import ImageEncoder
from trp_scale.models.positions import RelativeInputs
from trp_scale.models.vit import TransformerBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Position = tuple[int, int]
"""Row and column of a patch."""

BRIGHTEST = 0.995
"""The colour scale of attention ends at this quantile, or a few patches would leave the rest black."""


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
    patches = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).double()  # [N, 2]
    shares = attention.double() / attention.double().sum(1, keepdim=True)
    return float((shares * torch.cdist(patches, patches)).sum(1).mean())


def default_positions(grid: int) -> list[Position]:
    """Return three by three positions over the grid, fewer of a small one."""
    along = sorted({grid // 6, grid // 2, grid - 1 - grid // 6})
    return [(row, column) for row in along for column in along]


def draw_attention(images: Tensor, attention: Tensor, positions: Sequence[Position], path: Path) -> None:
    """A row for each image: the image, then what the patch at each position looks at.

    Args:
        images: [R, 3, S, S] in [0, 1].
        attention: [R, N, N] over patches.
        positions: (row, column) of the looking patches.
    """
    grid = round(attention.shape[1] ** 0.5)
    axes, figure = small_axes(len(images), 1 + len(positions))
    for row, (image, maps) in enumerate(zip(images, attention, strict=True)):
        show_image(axes[row, 0], image)
        chosen = torch.stack([maps[grid * at[0] + at[1]] for at in positions])
        brightest = float(chosen.quantile(BRIGHTEST))
        for column, (position, values) in enumerate(zip(positions, chosen, strict=True), start=1):
            _show_map(axes[row, column], values.view(grid, grid), position, brightest)
    axes[0, 0].set_title("image", fontsize=8)
    for column, position in enumerate(positions, start=1):
        axes[0, column].set_title(f"{position[0]}, {position[1]}", fontsize=8)
    figure.savefig(path, dpi=DPI)


def draw_average_attention(attention: Tensor, positions: Sequence[Position], path: Path) -> None:
    """Draw the attention of the patch at each position, averaged over images, with one colour scale.

    Args:
        attention: [N, N] over patches.
    """
    grid = round(attention.shape[0] ** 0.5)
    columns = min(len(positions), 9)
    rows = -(-len(positions) // columns)
    axes, figure = small_axes(rows, columns, side=1.5)
    chosen = torch.stack([attention[grid * at[0] + at[1]] for at in positions])
    brightest = float(chosen.quantile(BRIGHTEST))
    drawn = None
    for panel, position, values in zip(axes.flat, positions, chosen, strict=False):
        drawn = _show_map(panel, values.view(grid, grid), position, brightest)
        panel.set_title(f"{position[0]}, {position[1]}", fontsize=8)
    figure.colorbar(drawn, ax=axes.ravel().tolist(), shrink=0.8, label="attention")
    figure.savefig(path, dpi=DPI)


def _show_map(axes: Axes, values: Tensor, position: Position, brightest: float) -> Any:
    drawn = axes.imshow(values.numpy(), cmap="magma", vmin=0.0, vmax=brightest)
    row, column = position
    square = [column - 0.5, column + 0.5, column + 0.5, column - 0.5, column - 0.5]
    axes.plot(square, [row - 0.5, row - 0.5, row + 0.5, row + 0.5, row - 0.5], color="cyan", linewidth=1.0)
    return drawn
