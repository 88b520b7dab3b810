"""The pictures of a representation, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.evaluation.figures.attention import Position
from trp_scale.evaluation.figures.pictures import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 1.2
"""Side of a small picture, in inches."""

DPI = 110

NAMED_CLASSES = 20
"""More classes than these share colours and get no legend."""

BRIGHTEST = 0.995
"""The colour scale of attention ends at this quantile, or a few patches would leave the rest black."""


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
        _show(axes[row, 0], image)
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


def draw_plane(
    places: npt.NDArray[np.floating],
    labels: npt.NDArray[np.integer],
    names: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Each image as a point in the colour of its class.

    Args:
        places: [n, 2].
        labels: [n], all -1 where there are no classes.
        names: of the classes.
    """
    from matplotlib import colormaps

    figure = figure_class()(figsize=(7.5, 6), layout="constrained")
    axes = figure.subplots()
    classes = np.unique(labels).tolist()
    palette = colormaps["tab10" if len(classes) <= 10 else "tab20"]
    for number, label in enumerate(classes):
        across, up = places[labels == label].T
        name = names[label] if 0 <= label < len(names) else str(label)
        axes.scatter(across, up, s=9, alpha=0.75, color=palette(number % palette.N), label=name, linewidths=0)
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    if 1 < len(classes) <= NAMED_CLASSES:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, markerscale=2, frameon=False)
    figure.savefig(path, dpi=DPI)


class Decision(NamedTuple):
    """Decision of a classifier on one image.

    Attributes:
        image: [3, S, S] in [0, 1], as it sees it.
        map: [G, G] zero or more, where it looks.
        prediction: in words.
        right: whether it is.
    """

    image: Tensor
    map: Tensor
    prediction: str
    right: bool


def draw_activations(
    images: Tensor, captions: Sequence[str], decisions: Mapping[str, Sequence[Decision]], path: Path
) -> None:
    """A column for each image; a row of what each run decides by.

    Args:
        images: [R, 3, S, S] in [0, 1].
        captions: the class of each.
        decisions: of each run, on each image.
    """
    axes, figure = small_axes(1 + len(decisions), len(images), side=1.35)
    for column, (image, caption) in enumerate(zip(images, captions, strict=True)):
        _show(axes[0, column], image)
        axes[0, column].set_title(caption, fontsize=8)
    for row, (name, of_run) in enumerate(decisions.items(), start=1):
        axes[row, 0].set_ylabel(name, fontsize=8)
        for column, picture in enumerate(of_run):
            _show(axes[row, column], picture.image)
            largest = float(picture.map.max())
            scaled = picture.map / largest if largest > 0 else picture.map
            smooth = F.interpolate(scaled[None, None], size=picture.image.shape[-2:], mode="bilinear")[0, 0]
            axes[row, column].imshow(smooth.numpy(), cmap="jet", vmin=0, vmax=1, alpha=0.5)
            axes[row, column].set_title(
                picture.prediction, fontsize=8, color="tab:green" if picture.right else "tab:red"
            )
    figure.savefig(path, dpi=DPI)


def small_axes(rows: int, columns: int, side: float = SIDE) -> tuple[Any, Any]:
    """Places without ticks for small pictures, and their figure."""
    figure = figure_class()(figsize=(side * columns + 0.4, (side + 0.15) * rows + 0.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[], frame_on=False)
    return axes, figure


def _show(axes: Axes, image: Tensor) -> None:
    axes.imshow(image.permute(1, 2, 0).numpy())
