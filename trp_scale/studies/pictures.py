"""The picture of a study's outcome: each variant's mean with its interval, every run a dot; along an axis where the
variants have numbers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from trp_scale.evaluation.figures.pictures import figure_class
from trp_scale.studies.graph import TIME, Graph
from trp_scale.studies.outcome import Outcome, described, title_of


def draw(graph: Graph, outcome: Outcome, path: Path) -> bool:
    """Draw the outcome's row; False where no run has been judged."""
    cells = outcome.cells.get(outcome.outcome, {})
    if not cells:
        return False
    names = list(cells)
    numbers = {name: graph.variants[name.removesuffix(TIME)].at for name in names}
    along = [name for name in names if numbers[name] is not None] if graph.study.axis else []
    figure = figure_class()(figsize=(7, 4 if along else 1.1 + 0.42 * len(names)), layout="constrained")
    axes: Any = figure.subplots()
    row = outcome.metrics[outcome.outcome]
    label = f"{described(outcome.outcome)}: {row.metric}"
    if along:
        _curve(graph, outcome, axes, along)
        axes.set(xlabel=graph.study.axis, ylabel=label)
    else:
        _dots(graph, outcome, axes, names)
        axes.set(xlabel=label)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True


def _dots(graph: Graph, outcome: Outcome, axes: Any, names: list[str]) -> None:
    for height, name in enumerate(reversed(names)):
        seeds, cell = outcome.figures[outcome.outcome][name], outcome.cells[outcome.outcome][name]
        runs = [statistics.fmean(values) for values in seeds.values()]
        colour = "tab:grey" if name == graph.study.ground else "tab:red" if name == graph.study.baseline else "tab:blue"
        axes.plot(runs, [height] * len(runs), "o", color=colour, alpha=0.35, markersize=4)
        axes.errorbar(cell.spread.mean, height, xerr=cell.spread.half, fmt="D", color=colour, capsize=4, markersize=6)
    axes.set_yticks(range(len(names)), [title_of(graph, name) for name in reversed(names)])
    axes.axvline(_baseline(graph, outcome), color="tab:red", linewidth=0.8, alpha=0.6)


def _curve(graph: Graph, outcome: Outcome, axes: Any, names: list[str]) -> None:
    cells = outcome.cells[outcome.outcome]
    for timed in (False, True):
        mine = [name for name in names if name.endswith(TIME) == timed]
        places = sorted((graph.variants[name.removesuffix(TIME)].at or 0.0, name) for name in mine)
        if places:
            axes.errorbar(
                [at for at, _ in places],
                [cells[name].spread.mean for _, name in places],
                yerr=[cells[name].spread.half or 0.0 for _, name in places],
                fmt="o-",
                capsize=4,
                label="equal time" if timed else "equal steps",
            )
    axes.legend()


def _baseline(graph: Graph, outcome: Outcome) -> float:
    cells = outcome.cells[outcome.outcome]
    return cells[graph.study.baseline].spread.mean if graph.study.baseline in cells else float("nan")
