"""Evaluate a study: figures of all runs by row and variant, differences from the baseline, and a sentence for each by
rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trp_scale.reporting.paired_tests import holm
from trp_scale.reporting.results import RESULTS_FILE, TaskResult, judged_together
from trp_scale.reporting.statistics import ALPHA, POWER, Paired, Spread, paired, spread
from trp_scale.studies.graph import TIME, Graph
from trp_scale.studies.rows import Row, rows_of, summaries
from trp_scale.studies.study import AVERAGE, WORST

GROUND_LEVEL = 0.01
"""Largest p value at which pre-training is said to beat the untrained encoder."""

ALL = "all judges"


@dataclass(frozen=True, order=True)
class Place:
    """A row of the table. Attributes: judge: its name, or ALL; row: task, average or worst."""

    judge: str
    row: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A variant in a row.

    Attributes:
        spread: of its runs.
        difference: to the baseline, over the seeds that both have; None of the baseline itself or without common seeds.
        corrected: Holm's p value: of the outcome's row over its variants, of all others over all of theirs.
    """

    spread: Spread
    difference: Paired | None = None
    corrected: float | None = None


@dataclass(kw_only=True)
class Outcome:
    """Attributes:
    variants: in their order, equal-time ones behind the others.
    figures: by row, variant and seed, each judging's.
    metrics: by row.
    cells: by row and variant.
    missing: runs that are not there, and why.
    outcome: the row of the sentence.
    """

    variants: list[str]
    figures: dict[Place, dict[str, dict[int, list[float]]]]
    metrics: dict[Place, Row]
    outcome: Place
    cells: dict[Place, dict[str, Cell]] = field(default_factory=dict)


def read_outcome(graph: Graph) -> Outcome:
    """All results that are there."""
    study, scale = graph.study, graph.scale
    named = [*graph.variants, *(f"{name}{TIME}" for name in graph.timed() if "time" in scale.budgets)]
    figures: dict[Place, dict[str, dict[int, list[float]]]] = {}
    metrics: dict[Place, Row] = {}
    for name in named:
        for seed in range(scale.seeds):
            for place, row in _rows(graph, name, seed).items():
                figures.setdefault(place, {}).setdefault(name, {})[seed] = list(row.values)
                metrics.setdefault(place, row)
    named_row = study.outcome_at(scale)
    judges = named_row.judges
    chosen = Place(judges[0] if len(judges) == 1 else ALL, named_row.row)
    only = [place for place in figures if place.judge == chosen.judge and metrics[place].judged]
    if chosen.row in (AVERAGE, WORST) and len(only) == 1:  # of a single task
        chosen = only[0]
    found = [name for name in named if any(name in row for row in figures.values())]
    outcome = Outcome(variants=found, figures=figures, metrics=metrics, outcome=chosen)
    outcome.cells = {place: _cells(row, study.baseline) for place, row in figures.items()}
    _correct(outcome, study.baseline, study.ground)
    return outcome


def _rows(graph: Graph, variant: str, seed: int) -> dict[Place, Row]:
    """All rows of one run; none where equal time is equal steps, and no run was made."""
    found: dict[Place, Row] = {}
    tasks: dict[str, TaskResult] = {}
    judges = graph.study.outcome_at(graph.scale).judges
    for judge in graph.scale.judges:
        node = f"judged/{judge}/runs/{variant}/seed_{seed}"
        if not (graph.path(node) / RESULTS_FILE).is_file():
            continue
        results = graph.results(judge, node)
        found |= {Place(judge, name): row for name, row in rows_of(results).items() if _shown(name, results)}
        if judge in judges:
            tasks |= {f"{judge}: {task.task}": task for task in results if task.judged}
    measured = {place.judge for place in found}
    if len(judges) > 1 and measured >= set(judges) and len(set(map(judged_together, tasks.values()))) == 1:
        rows = rows_of([replace(task, task=name) for name, task in tasks.items()])
        found |= {Place(ALL, name): rows[name] for name in summaries(rows)}
    return found


def _shown(name: str, tasks: Sequence[TaskResult]) -> bool:
    """Average and worst of one task are that task."""
    return sum(task.judged for task in tasks) > 1 or name not in (AVERAGE, WORST)


def _cells(row: Mapping[str, Mapping[int, list[float]]], baseline: str) -> dict[str, Cell]:
    cells = {}
    for name, seeds in row.items():
        difference = None
        common = sorted(seeds.keys() & row.get(baseline, {}).keys())
        if name != baseline and common:
            one, two = ([statistics.fmean(row[each][seed]) for seed in common] for each in (baseline, name))
            difference = paired(one, two)
        cells[name] = Cell(spread=spread([seeds[seed] for seed in sorted(seeds)]), difference=difference)
    return cells


def _correct(outcome: Outcome, baseline: str, ground: str) -> None:
    """Give Holm's p values, in place: the outcome's row is a family, all other rows are another. The ground is no
    claim and has its own p value."""
    for chosen in (True, False):
        family = [
            (place, name)
            for place, row in outcome.cells.items()
            if (place == outcome.outcome) == chosen
            for name, cell in row.items()
            if name != ground and cell.difference is not None and cell.difference.test is not None
        ]
        values = [outcome.cells[place][name].difference.test.p for place, name in family]  # type: ignore[union-attr]
        for (place, name), value in zip(family, holm(values), strict=True):
            cell = outcome.cells[place][name]
            seeds = outcome.figures[place]
            common = sorted(seeds[name].keys() & seeds[baseline].keys())
            one, two = ([statistics.fmean(seeds[each][seed]) for seed in common] for each in (baseline, name))
            tested = paired(one, two, tests=len(family))
            outcome.cells[place][name] = replace(cell, difference=tested, corrected=value)


def verdict(cell: Cell, row: Row) -> str:
    """better, worse, or no difference seen; empty where nothing was tested."""
    if cell.difference is None or cell.corrected is None:
        return ""
    if cell.corrected >= ALPHA:
        return "no difference seen"
    return "better" if cell.difference.mean * row.sign > 0 else "worse"


def sentences(graph: Graph, outcome: Outcome) -> list[str]:
    """The outcome by rule: whether pre-training pays at all, then each variant against the baseline."""
    study, place = graph.study, outcome.outcome
    if place not in outcome.cells:
        return ["Nothing to state yet: no run has been judged."]
    row, cells = outcome.metrics[place], outcome.cells[place]
    titles = {name: title_of(graph, name) for name in outcome.variants}
    said = list(_ground(graph, outcome, titles))
    for name, cell in cells.items():
        found = verdict(cell, row)
        if found and name not in (study.baseline, study.ground):
            said.append(f"{titles[name]}: {_said(found, cell, titles[study.baseline])}")
    if len(said) == 0:
        return ["Nothing to state yet: fewer than two seeds have been judged."]
    return [
        f"Outcome: {described(place)}, {row.metric}, {'lower' if row.lower_is_better else 'higher'} is better.",
        *said,
    ]


def _said(found: str, cell: Cell, baseline: str) -> str:
    """A verdict in words, with what it rests on."""
    difference = cell.difference
    assert difference is not None and difference.test is not None and difference.half is not None
    low, high = difference.mean - difference.half, difference.mean + difference.half
    by = (
        f"{difference.mean:+.4f} (95 % interval {low:+.4f} to {high:+.4f}; {difference.test.seeds} seeds; p "
        f"{cell.corrected:.3g}, paired {difference.test.test} test, Holm)"
    )
    if found != "no difference seen":
        return f"{found} than {baseline} by {by}."
    return (
        f"no difference to {baseline} seen at this power: {by}; a difference of {difference.visible:.4f} would have "
        f"been seen {POWER:.0%} of the time."
    )


def _ground(graph: Graph, outcome: Outcome, titles: Mapping[str, str]) -> list[str]:
    """Whether the baseline beats the untrained encoder in the outcome's row; if not, whether it does on average."""
    study, place = graph.study, outcome.outcome
    gained = _gained(outcome, place, study.ground)
    if gained is None:
        return []
    gain, p = gained
    pays = gain > 0 and p < GROUND_LEVEL
    words = "pays here" if pays else "is not seen to pay here, so what follows says little"
    said = f"Pre-training {words}: {titles[study.baseline]} over {titles[study.ground]} {gain:+.4f} (p {p:.3g}, paired)"
    mean = _gained(outcome, Place(place.judge, AVERAGE), study.ground)
    if not pays and mean is not None and mean[0] > 0 and mean[1] < GROUND_LEVEL:
        said += f"; it does in the average of the tasks: {mean[0]:+.4f} (p {mean[1]:.3g})"
    return [f"{said}."]


def _gained(outcome: Outcome, place: Place, ground: str) -> tuple[float, float] | None:
    """How much better the baseline is than the untrained encoder, and p; None where that is not known, or has nothing
    to do with training: with each seed both have the same figure, as random masks have."""
    cell = outcome.cells.get(place, {}).get(ground)
    if cell is None or cell.difference is None or cell.difference.test is None:
        return None
    if cell.difference.mean == cell.difference.half == 0.0:
        return None
    return -cell.difference.mean * outcome.metrics[place].sign, cell.difference.test.p


def title_of(graph: Graph, name: str) -> str:
    """A variant's title; of equal time so called."""
    variant = graph.variants[name.removesuffix(TIME)]
    return f"{variant.title}, equal time" if name.endswith(TIME) else variant.title


def described(place: Place) -> str:
    """Row in words."""
    return f"{place.row} ({place.judge})"
