"""Results side by side, in the terminal, as Markdown and as CSV: which figures share a row, which task is each run's
worst, and which differences exceed the seed noise. `Measurement` is the result of a command that measures."""

from __future__ import annotations

import csv
import io
import os
import re
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import RenderableType
from rich.text import Text

from trp_scale.config import RefusedError
from trp_scale.console import Cell, Shown, Table, escape_markdown, figure_text
from trp_scale.errors import ExitStatus
from trp_scale.reporting.paired_tests import (
    LEAST_SEEDS,
    LEVEL,
    SIGNIFICANT,
    Difference,
    can_test,
    correct,
    paired_difference,
    wilson_interval,
)
from trp_scale.reporting.results import (
    AVERAGE,
    CONSTANT,
    RESULTS_FILE,
    SPEED,
    WORST,
    Results,
    SeedResult,
    TaskResult,
    join,
    judged_together,
)
from trp_scale.training.metrics import FEWEST, FINISHED, worst_task

Key = TypeVar("Key", bound=Hashable)

CONSTANT_COLUMN = "constant"

LEFT_COLUMNS = 3
"""Text columns; the rest are figures."""

CSV_COLUMNS = (
    *("task", "metric", "lower_is_better", "split", "run", "encoder", "recipe", "seeds", "values", "mean", "spread"),
    *("worst", "difference", "paired_seeds", "test", "p", "p_holm", "count"),
)


class RowKey(NamedTuple):
    """Key of a row: figures in one row have the same task, metric and measured rows."""

    task: str
    metric: str
    split: str
    lower_is_better: bool
    rows: str = ""

    def __str__(self) -> str:
        return f"{self.metric} on {self.split}{f': {self.rows}' if self.rows else ''}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Tasks x runs; the first run is the baseline.

    Attributes:
        runs: unique names.
        sources: encoder and recipe of each run.
        rows: figure of each run by key; `None` if it has none.
        worst: (row, run) of each run's worst task.
        summaries: by run, average and worst over comparable tasks, as rows without a metric; `None` if a run lacks a
            task.
        differences: of the later runs from the baseline, by row; `None` if a figure is missing.
        training: final figures of pre-training runs; then there are no rows.
        files: written by `trp-scale compare`.
    """

    runs: list[str]
    sources: list[tuple[str, str]]
    rows: dict[RowKey, list[TaskResult | None]]
    worst: set[tuple[RowKey, int]] = field(default_factory=set)
    summaries: dict[RowKey, list[float | None]] = field(default_factory=dict)
    differences: dict[RowKey, list[Difference | None]] = field(default_factory=dict)
    training: Table | None = None
    files: Sequence[Path] = ()

    @property
    def table(self) -> dict[str, list[Any]]:
        """Columns (CSV_COLUMNS) with an entry for each task and run, as `pandas.DataFrame` reads them; for pre-training
        runs, their final figures with an entry for each run."""
        if self.training is not None:
            _, *rows = self.training.cells()
            figures = {
                name.text: [
                    None if cell.text == "-" else cell.text if cell.order is None else cell.order for cell in row
                ]
                for name, *row in rows
            }
            return {"run": self.runs, **figures}
        entries = [
            _entry(self, key, number, task)
            for key, row in self.rows.items()
            for number, task in enumerate(row)
            if task is not None
        ]
        return {name: [entry[column] for entry in entries] for column, name in enumerate(CSV_COLUMNS)}

    @property
    def width(self) -> int:
        return super().width if self.training is None else self.training.width

    def parts(self) -> Iterator[RenderableType]:
        """Yield figures, differences from the first run, notes, and the files."""
        if self.rows:
            yield from (table.to_rich() for table in result_tables(self))
            yield from (Text(line, style="dim") for line in legend(self))
        if self.training is not None:
            yield from self.training.parts()
        yield from map(str, self.files)

    def constant(self, key: RowKey) -> float | None:
        """Return the metric of the best constant prediction, from the first run that stores it."""
        by_run = (task.metrics.get(CONSTANT + task.metric) for task in self.rows[key] if task is not None)
        return next((statistics.fmean(values) for values in by_run if values is not None), None)

    def count(self, key: RowKey) -> int | None:
        """Return the smallest number of measured elements (`TaskResult.count`) over the runs."""
        return min((task.count for task in self.rows[key] if task is not None and task.count is not None), default=None)

    def runs_in_row(self, key: RowKey) -> list[str]:
        """Return the runs that have a figure in the row."""
        return [run for run, task in zip(self.runs, self.rows[key], strict=True) if task is not None]

    @property
    def all_differences(self) -> list[Difference]:
        """Known differences, row by row."""
        return [difference for row in self.differences.values() for difference in row if difference is not None]


def compare_results(named: Mapping[str, Results]) -> Comparison:
    """Compare results. Figures by another metric or on another split get separate rows, which a note names. The worst
    task of a run is found among comparable judged tasks (`judged_together`) if there are two or more. Raises
    RefusedError if a run has a figure twice."""
    rows = _rows(named)
    worst: set[tuple[RowKey, int]] = set()
    summaries: dict[RowKey, list[float | None]] = {}
    for keys in _kinds(rows):
        for run in range(len(named)):
            tasks = {key: task for key in keys if (task := rows[key][run]) is not None and task.judged}
            if len(tasks) > 1:
                worst.add((find_worst(tasks), run))
        if len(keys) > 1 and not keys[0].lower_is_better:
            summaries |= _summaries(keys, rows)
    return Comparison(
        runs=list(named),
        sources=[(results.encoder or "scratch", results.recipe) for results in named.values()],
        rows=rows,
        worst=worst,
        summaries=summaries,
        differences=_differences(rows),
    )


def find_worst(tasks: Mapping[Key, TaskResult]) -> Key:
    """Return the worst of comparable tasks (training/metrics.py: worst_task)."""
    losses = {key: -task.sign * task.mean for key, task in tasks.items()}
    worst = worst_task(losses, {key: task.count for key, task in tasks.items()})
    assert worst is not None, "no tasks"
    return worst


def summarise(tasks: Mapping[Key, TaskResult]) -> dict[str, TaskResult]:
    """Return average and worst of comparable tasks."""
    first = next(iter(tasks.values()))
    metric = first.metric if len({task.metric for task in tasks.values()}) == 1 else "of the tasks' own"
    means = {AVERAGE: statistics.fmean(task.mean for task in tasks.values()), WORST: tasks[find_worst(tasks)].mean}
    kind: dict[str, Any] = {"metric": metric, "split": first.split, "lower_is_better": first.lower_is_better}
    return {name: join([SeedResult(task=name, seed=0, metrics={metric: mean}, **kind)]) for name, mean in means.items()}


def _rows(named: Mapping[str, Results]) -> dict[RowKey, list[TaskResult | None]]:
    """Group results by row in order of first appearance; rows of one task are adjacent."""
    rows: dict[RowKey, list[TaskResult | None]] = {}
    for number, (name, results) in enumerate(named.items()):
        for task in results.tasks:
            key = RowKey(task.task, task.metric, task.split, task.lower_is_better, task.rows)
            row = rows.setdefault(key, [None] * len(named))
            if row[number] is not None:
                raise RefusedError(f"{name}: {key.task}, {key.metric} on {key.split} occurs twice; allowed: once")
            row[number] = task
    order = list(dict.fromkeys(key.task for key in rows))
    return dict(sorted(rows.items(), key=lambda item: order.index(item[0].task)))


def _kinds(rows: Mapping[RowKey, Sequence[TaskResult | None]]) -> list[list[RowKey]]:
    kinds: dict[tuple[str, str], list[RowKey]] = {}
    for key, row in rows.items():
        judged = next((task for task in row if task is not None and task.judged), None)
        if judged is not None:
            kinds.setdefault(judged_together(judged), []).append(key)
    return list(kinds.values())


def _summaries(
    keys: Sequence[RowKey], rows: Mapping[RowKey, Sequence[TaskResult | None]]
) -> dict[RowKey, list[float | None]]:
    columns = zip(*(rows[key] for key in keys), strict=True)
    complete = [{key: task for key, task in zip(keys, column, strict=True) if task is not None} for column in columns]
    of_runs = [summarise(tasks) if len(tasks) == len(keys) else {} for tasks in complete]
    return {
        keys[0]._replace(task=name, metric="", rows=""): [run[name].mean if run else None for run in of_runs]
        for name in (AVERAGE, WORST)
    }


def _differences(rows: Mapping[RowKey, Sequence[TaskResult | None]]) -> dict[RowKey, list[Difference | None]]:
    """Return differences of the means over all seeds, with tests over common seeds, corrected over the table."""
    differences: dict[tuple[RowKey, int], Difference] = {}
    for key, (baseline, *others) in rows.items():
        for number, other in enumerate(others):
            if baseline is not None and other is not None:
                before, after = (dict(zip(task.seeds, task.values, strict=True)) for task in (baseline, other))
                paired = paired_difference(before, after) or Difference(value=0.0)
                differences[key, number] = replace(paired, value=other.mean - baseline.mean)
    differences |= correct(differences)
    return {key: [differences.get((key, number)) for number in range(len(row) - 1)] for key, row in rows.items()}


def names(runs: Sequence[Path]) -> list[str]:
    """Return the shortest path endings that are unique. Raises RefusedError for a repeated directory."""
    parts = [path.resolve().parts for path in runs]
    twice = [str(path) for path, count in Counter(map(Path.resolve, runs)).items() if count > 1]
    if twice:
        raise RefusedError(f"{twice[0]} is given twice; allowed: different directories")
    for depth in range(1, max(map(len, parts)) + 1):
        shortest = ["/".join(part[-depth:]) for part in parts]
        if len(set(shortest)) == len(shortest):
            return shortest
    raise AssertionError("different paths have different parts")


def result_tables(comparison: Comparison) -> list[Table]:
    """Return the table of figures, a table of groups for each task with groups, a table of precision, recall and speed
    for each detection and, for several runs, the table of differences."""
    by_group = {key: [_group_cells(task) for task in row] for key, row in comparison.rows.items()}
    tables = [_groups_table(comparison, key, cells) for key, cells in by_group.items() if any(cells)]
    tables += filter(None, (_detection_table(comparison, key) for key in comparison.rows))
    return [_figures(comparison), *tables, *([_differences_table(comparison)] if len(comparison.runs) > 1 else [])]


def _group_cells(task: TaskResult | None) -> dict[str, str]:
    """Format the accuracy of each group: mean over seeds, its interval, and the number of rows."""
    shares: dict[str, list[float]] = {}
    cells: dict[str, str] = {}
    for detail in [] if task is None else task.detail:
        listed = detail.get("groups")
        for name, entry in listed.items() if isinstance(listed, dict) else ():
            match entry:
                case {"accuracy": float(share), "count": int(n), "judged": bool(judged)} if 0 <= share <= 1 <= n:
                    shares.setdefault(name, []).append(share)
                    mean = statistics.fmean(shares[name])
                    low, high = wilson_interval(mean, n)
                    cells[name] = f"{mean:.4f} [{low:.4f}, {high:.4f}] of {n:,}{'' if judged else ' few'}"
    return cells


def _groups_table(comparison: Comparison, key: RowKey, cells: Sequence[Mapping[str, str]]) -> Table:
    """Build the table of the accuracy of each group, of all rows, and of the worst group, with their difference."""
    lines = [[name, *(of_run.get(name, "-") for of_run in cells)] for name in sorted(set().union(*cells))]
    for metric, title in (("group_average", "all rows"), ("worst_group", "worst group"), ("group_gap", "difference")):
        values = [None if task is None else task.metrics.get(metric) for task in comparison.rows[key]]
        lines.append([title, *("-" if value is None else f"{statistics.fmean(value):.4f}" for value in values)])
    notes = [f"mean over seeds, {LEVEL:.0%} interval (Wilson), number of rows; few: a group that is not the worst"]
    return Table(head=[f"groups of {key.task}", *comparison.runs], rows=lines, notes=notes)


OF_DETECTION = re.compile(r"(precision|recall)\d+")
"""Metrics at an IoU in per cent."""


def _detection_table(comparison: Comparison, key: RowKey) -> Table | None:
    """Build the table of precision and recall at several IoUs, and of the speed of inference; `None` without either."""
    tasks = comparison.rows[key]
    names = dict.fromkeys(name for task in tasks if task for name in task.metrics if OF_DETECTION.fullmatch(name))
    lines = {name: [task.metrics.get(name, []) if task else [] for task in tasks] for name in names}
    speeds = [[detail.get(SPEED) for detail in task.detail] if task else [] for task in tasks]
    lines["images/s"] = [[speed for speed in of_run if isinstance(speed, float)] for of_run in speeds]
    rows = [
        [name, *(figure_text(statistics.fmean(values) if values else None, 5) for values in of_runs)]
        for name, of_runs in lines.items()
        if any(of_runs)
    ]
    notes = ["mean over seeds, by IoU in per cent, of detections with a score of 0.5 or more; images/s: of one rank"]
    return Table(head=[f"detection of {key.task}", *comparison.runs], rows=rows, notes=notes) if rows else None


def to_markdown(comparison: Comparison) -> str:
    notes = "\n".join(f"- {escape_markdown(line)}" for line in legend(comparison))
    return "\n\n".join([*(table.to_markdown() for table in result_tables(comparison)), notes]) + "\n"


def to_csv(comparison: Comparison) -> str:
    """Return one line per figure in full precision; the baseline has no differences."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    table = comparison.table
    writer.writerow(table)
    writer.writerows(map(_csv_cell, entry) for entry in zip(*table.values(), strict=True))
    return file.getvalue()


def _entry(comparison: Comparison, key: RowKey, number: int, task: TaskResult) -> list[Any]:
    """Return the values of CSV_COLUMNS; `None` where one is missing."""
    difference = comparison.differences[key][number - 1] if number else None
    test = None if difference is None else difference.test
    return [
        *(key.task, key.metric, key.lower_is_better, key.split, comparison.runs[number], *comparison.sources[number]),
        *(task.seeds, task.values, task.mean, task.spread, (key, number) in comparison.worst),
        None if difference is None else difference.value,
        *((None, None, None) if test is None else (test.seeds, test.test, test.p)),
        None if difference is None else difference.corrected,
        task.count,
    ]


def _csv_cell(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(repr, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _figures(comparison: Comparison) -> Table:
    """Build the table of figures: mean, spread and seeds, then average and worst. If known, columns for the number of
    measured elements and the constant prediction precede the runs."""
    constants = {key: comparison.constant(key) for key in comparison.rows}
    known = {
        "count": {key: f"{count:,}" for key in comparison.rows if (count := comparison.count(key)) is not None},
        CONSTANT_COLUMN: {key: _number(value).text for key, value in constants.items() if value is not None},
    }
    before = {name: column for name, column in known.items() if column}
    rows: list[list[str | Cell]] = []
    for key, row in comparison.rows.items():
        cells: list[str | Cell] = [column.get(key, "-") for column in before.values()]
        for number, task in enumerate(row):
            worst = (key, number) in comparison.worst
            cells.append("-" if task is None else _figure(task, worst))
        rows.append([*_row_head(key), *cells])
    for key, values in comparison.summaries.items():
        rows.append([*_row_head(key), *[""] * len(before), *map(_number, values)])
    return Table(head=["task", "metric", "on", *before, *comparison.runs], rows=rows, words=LEFT_COLUMNS)


def _figure(task: TaskResult, worst: bool) -> Cell:
    """Format "0.8123 ± 0.0045 (3)": mean, sample standard deviation over seeds, number of seeds."""
    spread = f" ± {task.spread:.4f}" if len(task.seeds) > 1 else ""
    text = f"{task.mean:.4f}{spread} ({len(task.seeds)}){' worst' if worst else ''}"
    return Cell(text=text, strong=worst, order=task.mean)


def _differences_table(comparison: Comparison) -> Table:
    """Build the table of differences from the first run, with p values."""
    head = [f"{run} less {comparison.runs[0]}" for run in comparison.runs[1:]]
    rows = [[*_row_head(key), *map(_difference, row)] for key, row in comparison.differences.items()]
    for key, (first, *others) in comparison.summaries.items():
        changes = [None if first is None or value is None else value - first for value in others]
        rows.append([*_row_head(key), *(_number(change, sign=True) for change in changes)])
    return Table(head=["task", "metric", "on", *head], rows=rows, words=LEFT_COLUMNS)


def _difference(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell(text="-")
    text = _number(difference.value, sign=True).text
    if difference.test is not None:
        assert difference.corrected is not None
        p = "< 0.0001" if difference.corrected < 0.0001 else f"{difference.corrected:.4f}"
        name = "sign, " if difference.test.test == "sign" else ""
        text += f" (p {p}, {name}n {difference.test.seeds})"
    return Cell(text=text, strong=difference.is_significant, order=difference.value)


def _number(value: float | None, sign: bool = False) -> Cell:
    text = "-" if value is None else f"{value:+.4f}" if sign else f"{value:.4f}"
    return Cell(text=text, order=value)


def _row_head(key: RowKey) -> list[str | Cell]:
    return [key.task, f"{key.metric} (lower is better)" if key.lower_is_better else key.metric, key.split]


def legend(comparison: Comparison) -> list[str]:
    """Explain the figures and their sources, and name rows that cannot be compared."""
    lines = [
        f"{run}: {encoder}, {recipe}"
        for run, (encoder, recipe) in zip(comparison.runs, comparison.sources, strict=True)
    ]
    lines.append("figures: mean ± sample standard deviation over seeds (seeds); all except errors are shares of 1")
    if any(comparison.constant(key) is not None for key in comparison.rows):
        lines.append(
            f"{CONSTANT_COLUMN}: the best constant prediction, with one label, score or depth for all rows; a model "
            "below it has learned nothing"
        )
    if comparison.worst:
        lines.append(
            f"worst: the run's lowest mean on one split; tasks with fewer than {FEWEST} elements count only if all "
            "have fewer; an error metric is compared only with the same metric"
        )
    not_judged = [key.task for key, row in comparison.rows.items() if not any(task and task.judged for task in row)]
    if not_judged:
        lines.append(f"never worst, since they are not judged: {', '.join(not_judged)}")
    lines += dict.fromkeys(f"on {key.split}: {key.rows}" for key in comparison.rows if key.rows)
    if tests := sum(difference.test is not None for difference in comparison.all_differences):
        several = f"Holm-corrected for {tests} tests" if tests > 1 else "one test, uncorrected"
        lines.append(f"p: two-sided paired t-test over the n common seeds, {several}; bold: below {SIGNIFICANT}")
    return [*lines, *_notes_on_rows(comparison), *_notes_on_tests(comparison)]


def _notes_on_rows(comparison: Comparison) -> list[str]:
    notes = []
    for task in dict.fromkeys(key.task for key in comparison.rows):
        keys = [key for key in comparison.rows if key.task == task]
        partial = [key for key in keys if len(comparison.runs_in_row(key)) < len(comparison.runs)]
        if len(keys) > 1 and partial:
            ways = "; ".join(f"{key} ({', '.join(comparison.runs_in_row(key))})" for key in partial)
            notes.append(f"{task} is not compared between these rows: {ways}")
    for number, run in enumerate(comparison.runs):
        missing = [key.task for key, row in comparison.rows.items() if row[number] is None]
        if missing and any(run_number == number for _, run_number in comparison.worst):
            notes.append(f"the worst task of {run} is among its tasks; it lacks {', '.join(missing)}")
    return notes


def _notes_on_tests(comparison: Comparison) -> list[str]:
    if len(comparison.runs) < 2:
        return []
    notes = []
    tests = [difference.test for difference in comparison.all_differences]
    if not can_test():
        notes.append("no p values: scipy is not installed; run: pip install 'trp-scale[evaluation]'")
    elif None in tests:
        notes.append(f"no p value with fewer than {LEAST_SEEDS} common seeds or with figures that are not finite")
    if any(test is not None and test.test == "sign" for test in tests):
        notes.append("sign: all n differences are equal, so p is from the sign test")
    uneven = [
        key.task
        for key, (first, *others) in comparison.rows.items()
        if any(first and task and set(task.seeds) != set(first.seeds) for task in others)
    ]
    if uneven:
        tasks = ", ".join(dict.fromkeys(uneven))
        notes.append(
            f"seeds differ between runs ({tasks}): means are over all seeds of a run, p over the n common seeds"
        )
    return notes


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement(os.PathLike[str], Shown):
    """Result of `trp-scale finetune`, `evaluate` or `probe`, usable as the path of its directory.

    Attributes:
        path: directory with results.json.
        results: tasks with figures of each seed; those that are finished if the command was stopped.
        baseline: results of --baseline.
        reason: "finished", or why it was stopped.
        predictions: written files.
        status: exit status of the command.
        written: whether results.json was written: not for rows without labels, and not with --only.
    """

    path: Path
    results: Results
    baseline: Results | None = None
    reason: str = FINISHED
    predictions: Sequence[Path] = ()
    status: ExitStatus = ExitStatus.DONE
    written: bool = True

    @property
    def finished(self) -> bool:
        """Whether all runs are done."""
        return self.reason == FINISHED

    @property
    def scores(self) -> dict[str, float]:
        """Main figure of each task: mean over seeds."""
        return {task.task: task.mean for task in self.results.tasks}

    @property
    def worst_task(self) -> str | None:
        """Worst of the judged tasks whose figures are comparable (`judged_together`), of the first such group; `None`
        without a judged task."""
        judged = [task for task in self.results.tasks if task.judged]
        group = {task.task: task for task in judged if judged_together(task) == judged_together(judged[0])}
        return find_worst(group) if group else None

    def parts(self) -> Iterator[RenderableType]:
        """Yield the predictions, the table with the differences from the baseline, and the path of results.json."""
        yield from map(str, self.predictions)
        if self.results.tasks:
            named = {} if self.baseline is None else {"baseline": self.baseline}
            yield from compare_results({**named, "this run": self.results}).parts()
        if not self.finished:
            yield f"stopped: {self.reason}; the same call continues"
        elif self.written:
            yield str(self.path / RESULTS_FILE)

    def __fspath__(self) -> str:
        return str(self.path)
