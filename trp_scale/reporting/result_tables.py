"""Results as tables: in the terminal, as Markdown and as CSV. The one way in which figures of runs are printed.
`trp-scale compare` puts several runs side by side in them."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trp_scale.config import RefusedError
from trp_scale.reporting.paired_tests import (
    SIGNIFICANT,
    Comparison,
    Difference,
    RowKey,
    Summary,
    compare_directories,
    compare_results,
)
from trp_scale.reporting.results import Results, TaskResult
from trp_scale.training.metrics import FEWEST

BASELINE, THIS_RUN, CONSTANT_COLUMN = "baseline", "this run", "constant"

WIDE = 160
"""Columns of text where no terminal says how many it has, as in a log."""

LEFT_COLUMNS = 3
"""Columns of words; the rest are figures."""

CSV_COLUMNS = (
    *("task", "metric", "lower_is_better", "split", "run", "encoder", "recipe", "seeds", "values", "mean", "spread"),
    *("worst", "difference", "paired_seeds", "test", "p", "p_holm", "count"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Table cell of results.

    Attributes:
        bold: the run's worst task, or a difference that is significant.
    """

    text: str
    bold: bool = False


Rows = list[list[Cell]]


def print_results(results: Results, baseline: Results | None = None, console: Console | None = None) -> None:
    """The table of one run; against a baseline, both and what differs."""
    named = {THIS_RUN: results} if baseline is None else {BASELINE: baseline, THIS_RUN: results}
    print_comparison(compare_results(named), console)


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print figures, differences from the first run, and notes."""
    console = console or (Console() if sys.stdout.isatty() else Console(width=WIDE))
    console.print(_rich(figure_rows(comparison)))
    if len(comparison.runs) > 1:
        console.print(_rich(difference_rows(comparison)))
    for line in legend(comparison):
        console.print(Text(line, style="dim"))


def _rich(rows: Rows) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place, cell in enumerate(rows[0]):
        table.add_column(Text(cell.text), justify="left" if place < LEFT_COLUMNS else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in row))
    return table


def markdown(comparison: Comparison) -> str:
    """Both tables and the notes."""
    tables = [figure_rows(comparison)] + ([difference_rows(comparison)] if len(comparison.runs) > 1 else [])
    notes = "\n".join(f"- {_escaped(line)}" for line in legend(comparison))
    return "\n\n".join([*(markdown_table(rows) for rows in tables), notes]) + "\n"


def markdown_table(rows: Rows, *, words: int = LEFT_COLUMNS) -> str:
    """Rows as a Markdown table, the first as its head; all but the first `words` columns are figures."""
    align = ["---" if place < words else "---:" for place in range(len(rows[0]))]
    lines = [[f"**{_escaped(cell.text)}**" if cell.bold else _escaped(cell.text) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], align, *lines[1:]))


def _escaped(text: str) -> str:
    for character in ("\\", "|", "*", "_", "<", "[", "]"):
        text = text.replace(character, f"\\{character}")
    return text


def csv_text(comparison: Comparison) -> str:
    """One line for each figure, numbers in full; the baseline's have no difference."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for key, row in comparison.rows.items():
        for number, task in enumerate(row):
            if task is not None:
                writer.writerow(_csv_line(comparison, key, number, task))
    return file.getvalue()


def _csv_line(comparison: Comparison, key: RowKey, number: int, task: TaskResult) -> list[object]:
    difference = comparison.differences[key][number - 1] if number else None
    test = None if difference is None else difference.test
    return [
        *(key.task, key.metric, str(key.lower_is_better).lower(), key.split, comparison.runs[number]),
        *comparison.sources[number],
        *(" ".join(map(str, task.seeds)), " ".join(map(repr, task.values)), repr(task.mean), repr(task.spread)),
        str((key, number) in comparison.worst).lower(),
        "" if difference is None else repr(difference.value),
        *(("", "", "") if test is None else (test.seeds, test.test, repr(test.p))),
        "" if difference is None or difference.corrected is None else repr(difference.corrected),
        "" if task.count is None else task.count,
    ]


def figure_rows(comparison: Comparison) -> Rows:
    """Tasks x runs: mean, spread and seeds; average and worst below them. Where they are known, the number of measured
    elements and what a constant prediction reaches stand before the runs."""
    constants = {key: comparison.constant(key) for key in comparison.rows}
    beside = {
        "count": {key: f"{count:,}" for key in comparison.rows if (count := comparison.count(key)) is not None},
        CONSTANT_COLUMN: {key: _number(value) for key, value in constants.items() if value is not None},
    }
    beside = {name: column for name, column in beside.items() if column}
    rows: Rows = [_header([*beside, *comparison.runs])]
    for key, row in comparison.rows.items():
        cells = _left(key) + [Cell(text=column.get(key, "-")) for column in beside.values()]
        for number, task in enumerate(row):
            worst = (key, number) in comparison.worst
            cells.append(Cell(text="-" if task is None else figure(task, worst), bold=worst))
        rows.append(cells)
    for summary in comparison.summaries:
        blank = [Cell(text="") for _ in beside]
        rows.append([*_summary_left(summary), *blank, *(Cell(text=_number(value)) for value in summary.values)])
    return rows


def figure(task: TaskResult, worst: bool = False) -> str:
    """0.8123 ± 0.0045 (3): mean, sample standard deviation over seeds, number of seeds."""
    spread = f" ± {task.spread:.4f}" if len(task.seeds) > 1 else ""
    return f"{task.mean:.4f}{spread} ({len(task.seeds)}){' worst' if worst else ''}"


def difference_rows(comparison: Comparison) -> Rows:
    """Each later run's mean less the first's, and the p value."""
    baseline = comparison.runs[0]
    rows: Rows = [_header([f"{run} less {baseline}" for run in comparison.runs[1:]])]
    for key, row in comparison.differences.items():
        rows.append([*_left(key), *(_difference(one) for one in row)])
    for summary in comparison.summaries:
        first = summary.values[0]
        changes = [None if first is None or value is None else value - first for value in summary.values[1:]]
        rows.append([*_summary_left(summary), *(Cell(text=_number(value, sign=True)) for value in changes)])
    return rows


def _difference(one: Difference | None) -> Cell:
    if one is None:
        return Cell(text="-")
    text = _number(one.value, sign=True)
    if one.test is not None:
        assert one.corrected is not None
        name = "sign, " if one.test.test == "sign" else ""
        text += f" (p {_probability(one.corrected)}, {name}n {one.test.seeds})"
    return Cell(text=text, bold=one.significant)


def _probability(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def _number(value: float | None, sign: bool = False) -> str:
    return "-" if value is None else f"{value:+.4f}" if sign else f"{value:.4f}"


def _header(names: Sequence[str]) -> list[Cell]:
    return [Cell(text=name) for name in ("task", "metric", "on", *names)]


def _left(key: RowKey) -> list[Cell]:
    metric = f"{key.metric} (lower is better)" if key.lower_is_better else key.metric
    return [Cell(text=text) for text in (key.task, metric, key.split)]


def _summary_left(summary: Summary) -> list[Cell]:
    return [Cell(text=text) for text in (summary.name, "", summary.split)]


def legend(comparison: Comparison) -> list[str]:
    """Explain the figures, their source, and what cannot be compared."""
    lines = [
        f"{run}: {encoder}, {recipe}"
        for run, (encoder, recipe) in zip(comparison.runs, comparison.sources, strict=True)
    ]
    lines.append("figures: mean ± sample standard deviation over seeds (seeds); all but errors are shares of 1")
    if any(comparison.constant(key) is not None for key in comparison.rows):
        lines.append(
            f"{CONSTANT_COLUMN}: what the best constant prediction reaches, one label, score or depth for all rows; a "
            "model that is not above it has learned nothing"
        )
    if comparison.worst:
        lines.append(
            f"worst: the run's lowest mean of those where more is better, on one split, of {FEWEST} elements or more "
            "where any has as many; an error is worst only among tasks of the same metric"
        )
    if beside := comparison.beside:
        lines.append(f"never worst: {', '.join(beside)}, which stand beside the tasks that are judged")
    lines += dict.fromkeys(f"on {key.split}: {key.rows}" for key in comparison.rows if key.rows)
    if comparison.tests:
        several = f"Holm-corrected for {comparison.tests} tests" if comparison.tests > 1 else "one test, uncorrected"
        lines.append(
            f"p: paired t-test over the n seeds that both runs have, two-sided, {several}; bold: below {SIGNIFICANT}"
        )
    return [*lines, *comparison.notes]


def compare(runs: Sequence[Path], *, markdown_file: Path | None = None, csv_file: Path | None = None) -> None:
    """Print what the runs reached, and write it as Markdown and as CSV where a file is given.

    Raises:
        RefusedError: a directory without results.json, the same one twice, or a file that cannot be written.
    """
    comparison = compare_directories(runs)
    print_comparison(comparison)
    for path, text in ((markdown_file, markdown), (csv_file, csv_text)):
        if path is not None:
            _write(path, text(comparison))
            print(path)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror}") from error
