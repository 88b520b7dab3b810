"""`trp-scale compare --html`: runs side by side, their curves over each other, end figures, settings, and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.config.loader import flat
from trp_scale.errors import RefusedError, shorten
from trp_scale.reporting.curves import Curve
from trp_scale.reporting.document import (
    Block,
    Cell,
    Page,
    Section,
    Sentences,
    Table,
    number_cell,
    page_text,
    plotly_source,
)
from trp_scale.reporting.figures import Colour, Line, Plot, colours
from trp_scale.reporting.how_it_went import GIB
from trp_scale.reporting.paired_tests import Comparison, compare_results, names
from trp_scale.reporting.record import RunRecord, read_run
from trp_scale.reporting.result_tables import Rows, compare, difference_rows, figure_rows, legend
from trp_scale.reporting.results import RESULTS_FILE, read_results
from trp_scale.reporting.tasks import words
from trp_scale.storage.files import write_text
from trp_scale.training.metrics import TaskHistory

LEFT = 3
"""First columns of a table of results that are words."""

MOST_TASKS = 24
"""Tasks that have plots of their own."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Runs by name, in their order.

    Attributes:
        runs: those with metrics.
        results: of those with results.json, side by side; None where none has.
        colour_of: of each run.
    """

    runs: dict[str, RunRecord]
    results: Comparison | None
    colour_of: dict[str, Colour]


def compare_as_page(
    directories: Sequence[Path], page: Path, *, markdown_file: Path | None = None, csv_file: Path | None = None
) -> None:
    """Print what `compare` prints of the runs with results.json, and write a page of all.

    Raises:
        RefusedError: a directory with neither results.json nor metrics.jsonl, the same one twice, plotly is not
            installed, or a file that cannot be written.
    """
    plotly_source()  # refused before the runs are read
    judged = [each for each in directories if (each / RESULTS_FILE).is_file()]
    for each in directories:
        if each not in judged and not (each / METRICS_FILE).is_file():
            raise RefusedError(
                f"{each} has neither {RESULTS_FILE} nor {METRICS_FILE}; allowed: directories of trp-scale pretrain, "
                "finetune, evaluate or probe"
            )
    if judged or markdown_file is not None or csv_file is not None:
        compare(judged, markdown_file=markdown_file, csv_file=csv_file)
    found = dict(zip(names(directories), directories, strict=True))
    results = {name: read_results(path) for name, path in found.items() if path in judged}
    compared = Compared(
        runs={name: read_run(path) for name, path in found.items() if (path / METRICS_FILE).is_file()},
        results=compare_results(results) if results else None,
        colour_of=colours(found),
    )
    text = page_text(comparison_page(compared))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_text(page, text)
    except OSError as error:
        raise RefusedError(f"--html {page} cannot be written: {error.strerror}") from error
    print(page)


def comparison_page(compared: Compared) -> Page:
    """One page of several runs."""
    count = len(compared.colour_of)
    sections = [*_results(compared), *_end_figures(compared), *_curves(compared), *_settings(compared)]
    return Page(
        kind="Comparison",
        title=f"{count} run{'s' * (count > 1)} side by side",
        lead=[shorten(", ".join(compared.colour_of), 1000)],
        sections=sections,
        made_of="Made by trp-scale compare.",
    )


def _results(compared: Compared) -> Iterator[Section]:
    comparison = compared.results
    if comparison is None:
        return
    tables = [figure_rows(comparison)] + ([difference_rows(comparison)] if len(comparison.runs) > 1 else [])
    blocks: list[Block] = [_table(rows) for rows in tables]
    yield Section(
        name="results",
        title="Downstream results",
        look_for="Whether a difference is larger than the seeds make: bold ones are, after correction for all tests.",
        blocks=[*blocks, Sentences(sentences=legend(comparison))],
    )


def _table(rows: Rows) -> Table:
    head, *body = rows
    cells = [
        [
            Cell(text=cell.text, strong=cell.bold, order=_number_in(cell.text) if place >= LEFT else None)
            for place, cell in enumerate(row)
        ]
        for row in body
    ]
    return Table(head=[cell.text for cell in head], rows=cells, words=LEFT)


def _number_in(text: str) -> float | None:
    """The figure that a cell begins with."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def _end_figures(compared: Compared) -> Iterator[Section]:
    """One table: a row for each run, a column for each task's loss at the end, and what it took."""
    runs = compared.runs
    if not runs:
        return
    tasks = _tasks(compared)
    several = any(len(run.history.tasks) > 1 for run in runs.values())
    columns: list[tuple[str, Callable[[RunRecord], float | None], bool]] = [
        *([("worst task", lambda run: getattr(_worst_task(run), "end", None), True)] if several else []),
        *([("its elements", lambda run: getattr(_worst_task(run), "count", None), False)] if several else []),
        *((task, _end_of(task), True) for task in tasks),
        ("held-out loss", lambda run: _last(run.curves.held_out.get("loss", {}).get("", Curve())), True),
        ("steps", lambda run: run.history.last_step, False),
        ("s a step", lambda run: run.history.step_seconds, False),
        ("waiting for data %", lambda run: _percent(run.history.data_wait_share), False),
        ("memory, GiB", lambda run: run.history.peak_memory_bytes / GIB, False),
    ]
    values = {name: [take(run) for _, take, _ in columns] for name, run in runs.items()}
    known = [place for place in range(len(columns)) if any(own[place] is not None for own in values.values())]
    best = {place: min(own[place] or 0.0 for own in values.values() if own[place] is not None) for place in known}
    rows = []
    for name, run in runs.items():
        cells = [Cell(text=name, colour=compared.colour_of[name]), Cell(text=run.state.word)]
        for place in known:
            value, is_loss = values[name][place], columns[place][2]
            cell = number_cell(value)
            cells.append(
                Cell(text=cell.text, order=cell.order, strong=is_loss and len(runs) > 1 and value == best[place])
            )
        rows.append(cells)
    note = (
        "Losses: means over the last tenth of a run's steps, weighted by elements; bold: the lowest. Losses of runs "
        "with other masks, targets or tokens are not of one scale."
    )
    yield Section(
        name="end",
        title="End figures",
        look_for="The run whose worst task ends lowest, and what it cost.",
        blocks=[Table(head=["run", "end", *(columns[place][0] for place in known)], rows=rows, words=2, note=note)],
    )


def _tasks(compared: Compared) -> list[str]:
    return list(dict.fromkeys(task for run in compared.runs.values() for task in run.history.tasks))


def _worst_task(run: RunRecord) -> TaskHistory | None:
    return run.history.tasks.get(run.history.worst_task or "")


def _end_of(task: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.history.tasks[task].end if task in run.history.tasks else None


def _last(curve: Curve) -> float | None:
    return curve.values[-1] if len(curve) else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def _curves(compared: Compared) -> Iterator[Section]:
    """A plot for each figure, a line for each run that has it."""
    plots = []
    for task in _tasks(compared)[:MOST_TASKS]:
        plots.append(_plot(compared, f"{task}: training loss", lambda run, task=task: run.curves.losses.get(task)))  # type: ignore[misc]
        for figure in dict.fromkeys(name for run in compared.runs.values() for name in run.curves.held_out):
            take = lambda run, task=task, figure=figure: run.curves.held_out.get(figure, {}).get(task)  # noqa: E731
            plots.append(_plot(compared, f"{task}: held-out {words(figure)}", take))
    plots = [plot.shown() for plot in plots if plot.lines]
    if plots:
        yield Section(
            name="curves",
            title="Curves",
            look_for=(
                "Where runs part, and whether they stay apart. A run keeps its colour; a click on its name hides it."
            ),
            blocks=plots,
        )


def _plot(compared: Compared, title: str, take: Callable[[RunRecord], Curve | None]) -> Plot:
    lines = []
    for name, run in compared.runs.items():
        curve = take(run)
        if curve is not None and len(curve):
            lines.append(Line(name=name, points=curve.points(), colour=compared.colour_of[name]))
    return Plot(title=title, lines=lines)


def _settings(compared: Compared) -> Iterator[Section]:
    """Settings in which the runs differ."""
    found = {name: flat(run.settings) for name, run in compared.runs.items() if run.settings}
    if len(found) < 2:
        return
    rows = []
    for setting in dict.fromkeys(name for own in found.values() for name in own):
        if any(setting not in own for own in found.values()):
            continue  # of a kind or a hook that not all have: the settings `kind` and `hooks` say so
        values = [json.dumps(own[setting]) for own in found.values()]
        if len(set(values)) > 1:
            cells = [Cell(text=shorten(value.strip('"'), 300), code=True) for value in values]
            rows.append([Cell(text=setting, code=True), *cells])
    if rows:
        yield Section(
            name="settings",
            title="Settings that differ",
            look_for="A difference between the runs that is not in this table is one of data, version or chance.",
            blocks=[Table(head=["setting", *found], rows=rows, words=1 + len(found))],
        )
