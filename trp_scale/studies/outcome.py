"""Evaluate a study: figures by row and variant, differences from the baseline, and one sentence per variant. A row is a
task of a judge, or the average or worst of comparable tasks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trp_scale.reporting.comparison import summarise
from trp_scale.reporting.paired_tests import POWER, Difference, Spread, correct, paired_difference, spread
from trp_scale.reporting.results import AVERAGE, RESULTS_FILE, WORST, TaskResult, judged_together
from trp_scale.studies.graph import TIME, Graph, collect_rows

GROUND_LEVEL = 0.01
"""Largest p value at which pre-training is reported to beat the untrained encoder."""

ALL = "all judges"


@dataclass(frozen=True, order=True)
class JudgeRow:
    """Row of the table. Attributes: judge: name or ALL; row: task, average or worst."""

    judge: str
    row: str

    def __str__(self) -> str:
        return f"{self.row} ({self.judge})"


@dataclass(frozen=True, kw_only=True)
class VariantResult:
    """Result of a variant in one row.

    Attributes:
        spread: over its runs.
        difference: from the baseline over common seeds; `None` for the baseline or without common seeds. p values are
        Holm-corrected in two families: the outcome row, and all other rows.
    """

    spread: Spread
    difference: Difference | None = None


@dataclass(kw_only=True)
class Outcome:
    """Results of a study.

    Attributes:
        variants: in the order of the file; equal-time variants last.
        figures: by row, variant and seed; one value per judging seed.
        metrics: by row.
        cells: by row and variant.
        outcome: row that the sentences are about.
    """

    variants: list[str]
    figures: dict[JudgeRow, dict[str, dict[int, list[float]]]]
    metrics: dict[JudgeRow, TaskResult]
    outcome: JudgeRow
    cells: dict[JudgeRow, dict[str, VariantResult]] = field(default_factory=dict)


def read_outcome(graph: Graph) -> Outcome:
    """Read all existing results."""
    study, scale = graph.study, graph.scale
    names = [*graph.variants, *(f"{name}{TIME}" for name in graph.trained_variants() if "time" in scale.budgets)]
    figures: dict[JudgeRow, dict[str, dict[int, list[float]]]] = {}
    metrics: dict[JudgeRow, TaskResult] = {}
    for name in names:
        for seed in range(scale.seeds):
            for key, row in _rows(graph, name, seed).items():
                figures.setdefault(key, {}).setdefault(name, {})[seed] = list(row.values)
                metrics.setdefault(key, row)
    outcome_row = study.outcome_row(scale)
    judges = outcome_row.judges
    chosen = JudgeRow(judges[0] if len(judges) == 1 else ALL, outcome_row.row)
    judged = [key for key in figures if key.judge == chosen.judge and metrics[key].judged]
    if chosen.row in (AVERAGE, WORST) and len(judged) == 1:  # of a single task
        chosen = judged[0]
    measured = [name for name in names if any(name in row for row in figures.values())]
    outcome = Outcome(variants=measured, figures=figures, metrics=metrics, outcome=chosen)
    outcome.cells = {key: _compare_variants(row, study.baseline) for key, row in figures.items()}
    _correct(outcome, study.ground)
    return outcome


def _rows(graph: Graph, variant: str, seed: int) -> dict[JudgeRow, TaskResult]:
    """Return all rows of one run; empty if the run does not exist."""
    rows: dict[JudgeRow, TaskResult] = {}
    tasks: dict[str, TaskResult] = {}
    judges = graph.study.outcome_row(graph.scale).judges
    for judge in graph.scale.judges:
        node = f"judged/{judge}/runs/{variant}/seed_{seed}"
        if not (graph.path(node) / RESULTS_FILE).is_file():
            continue
        results = graph.results(judge, node)
        for name, row in collect_rows(results).items():
            # With one task, average and worst repeat it.
            if name not in (AVERAGE, WORST) or sum(task.judged for task in results) > 1:
                rows[JudgeRow(judge, name)] = row
        if judge in judges:
            tasks |= {f"{judge}: {task.task}": task for task in results if task.judged}
    measured = {key.judge for key in rows}
    if len(judges) > 1 and measured >= set(judges) and len(set(map(judged_together, tasks.values()))) == 1:
        rows |= {JudgeRow(ALL, name): row for name, row in summarise(tasks).items()}
    return rows


def _compare_variants(row: Mapping[str, Mapping[int, list[float]]], baseline: str) -> dict[str, VariantResult]:
    means = {name: {seed: statistics.fmean(values) for seed, values in seeds.items()} for name, seeds in row.items()}
    return {
        name: VariantResult(
            spread=spread([seeds[seed] for seed in sorted(seeds)]),
            difference=None if name == baseline else paired_difference(means.get(baseline, {}), means[name]),
        )
        for name, seeds in row.items()
    }


def _correct(outcome: Outcome, ground: str) -> None:
    """Set Holm-corrected p values in place. The outcome row is one family, all other rows another. The untrained
    encoder belongs to neither."""
    for is_outcome in (True, False):
        family = {
            (key, name): cell.difference
            for key, row in outcome.cells.items()
            if (key == outcome.outcome) == is_outcome
            for name, cell in row.items()
            if name != ground and cell.difference is not None
        }
        for (key, name), difference in correct(family).items():
            outcome.cells[key][name] = replace(outcome.cells[key][name], difference=difference)


def verdict(cell: VariantResult, row: TaskResult) -> str:
    """Return better, worse or no difference seen; empty without a test."""
    difference = cell.difference
    if difference is None or difference.corrected is None:
        return ""
    if not difference.is_significant:
        return "no difference seen"
    return "better" if difference.value * row.sign > 0 else "worse"


def describe_outcome(graph: Graph, outcome: Outcome) -> list[str]:
    """Describe whether pre-training beats the untrained encoder, then each variant against the baseline."""
    study, key = graph.study, outcome.outcome
    if key not in outcome.cells:
        return ["No result yet: no run has been judged."]
    row, cells = outcome.metrics[key], outcome.cells[key]
    sentences = list(_describe_ground(graph, outcome))
    for name, cell in cells.items():
        seen = verdict(cell, row)
        if seen and cell.difference is not None and name not in (study.baseline, study.ground):
            sentence = _describe_verdict(seen, cell.difference, graph.title(study.baseline))
            sentences.append(f"{graph.title(name)}: {sentence}")
    if not sentences:
        return ["No result yet: fewer than two seeds have been judged."]
    return [f"Outcome: {key}, {row.metric}, {'lower' if row.lower_is_better else 'higher'} is better.", *sentences]


def _describe_verdict(seen: str, difference: Difference, baseline: str) -> str:
    assert difference.test is not None and difference.half is not None
    low, high = difference.value - difference.half, difference.value + difference.half
    by = (
        f"{difference.value:+.4f} (95 % interval {low:+.4f} to {high:+.4f}; {difference.test.seeds} seeds; p "
        f"{difference.corrected:.3g}, paired {difference.test.test} test, Holm)"
    )
    if seen != "no difference seen":
        return f"{seen} than {baseline} by {by}."
    return (
        f"no difference to {baseline} seen: {by}; a difference of {difference.visible:.4f} is detected with a power of "
        f"{POWER:.0%}."
    )


def _describe_ground(graph: Graph, outcome: Outcome) -> list[str]:
    """Compare the baseline with the untrained encoder in the outcome row; if it is not better, also on average."""
    study, key = graph.study, outcome.outcome
    gain, p = _gain(outcome, key, study.ground)
    if gain is None:
        return []
    pays = gain > 0 and p < GROUND_LEVEL
    words = "pays here" if pays else "does not pay here, so the following results say little"
    titles = f"{graph.title(study.baseline)} over {graph.title(study.ground)}"
    sentence = f"Pre-training {words}: {titles} {gain:+.4f} (p {p:.3g}, paired)"
    mean, p = _gain(outcome, JudgeRow(key.judge, AVERAGE), study.ground)
    if not pays and mean is not None and mean > 0 and p < GROUND_LEVEL:
        sentence += f"; it pays on average over the tasks: {mean:+.4f} (p {p:.3g})"
    return [f"{sentence}."]


def _gain(outcome: Outcome, key: JudgeRow, ground: str) -> tuple[float | None, float]:
    """Return gain and p value of the baseline over the untrained encoder. The gain is `None` if unknown, or if both are
    equal for each seed: then the row does not depend on training, as for random masks."""
    cell = outcome.cells.get(key, {}).get(ground)
    if cell is None or cell.difference is None or cell.difference.test is None:
        return None, 1.0
    if cell.difference.value == cell.difference.error == 0.0:
        return None, 1.0
    return -cell.difference.value * outcome.metrics[key].sign, cell.difference.test.p
