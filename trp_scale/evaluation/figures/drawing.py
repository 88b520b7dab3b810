"""Shared parts of pictures: matplotlib figure, panels, legend, and caption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trp_scale.config import RefusedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE_INCHES = 1.2
"""Side of a panel."""

DPI = 110

LEGEND_INCHES = 1.4
"""Width of a legend column."""


class Picture(NamedTuple):
    """PNG file and its caption."""

    path: Path
    caption: str

    def __str__(self) -> str:
        return f"{self.path}: {self.caption}"


def figure_class() -> type[Figure]:
    """Return matplotlib's figure class, without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError("pictures need matplotlib; run: pip install 'trp-scale[pictures]'") from error
    return Figure


def small_axes(rows: int, columns: int, side: float = SIDE_INCHES) -> tuple[Any, Any]:
    """Return panels without ticks, [rows, columns], and their figure."""
    figure = figure_class()(figsize=(side * columns + 0.4, (side + 0.15) * rows + 0.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[], frame_on=False)
    return axes, figure


def show_image(axes: Axes, image: Tensor) -> None:
    """Show [3, H, W] in [0, 1]."""
    axes.imshow(image.permute(1, 2, 0).numpy())


def draw_legend(figure: Figure, entries: Sequence[tuple[str, Any]]) -> None:
    """Draw a legend of (text, colour) below a figure with the layout "constrained"."""
    from matplotlib.patches import Patch

    if entries:
        handles = [Patch(facecolor=colour, label=words) for words, colour in entries]
        columns = max(1, min(len(handles), int(figure.get_figwidth() / LEGEND_INCHES)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
