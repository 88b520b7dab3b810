"""`trp-scale compare --html`: curves, final figures, settings and results of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.config.loader import flat
from trp_scale.console import Cell, Colour, Table
from trp_scale.errors import RefusedError, shorten
from trp_scale.reporting.comparison import (
    END_NOTE,
    Comparison,
    compare,
    end_figures,
    legend,
    names,
    result_tables,
    task_names,
    write_output,
)
from trp_scale.reporting.document import Line, Page, PageSection, Plot, Sentences, colours, page_text, plotly_source
from trp_scale.reporting.record import Curve, RunRecord, read_run
from trp_scale.reporting.results import RESULTS_FILE
from trp_scale.training.report import to_words

MOST_TASKS = 24
"""Tasks that get plots."""


@dataclass(frozen=True, kw_only=True)
class ComparedRuns:
    """Runs by name.

    Attributes:
        runs: those with metrics.
        results: comparison of those with results.json; `None` if none has.
    """

    runs: dict[str, RunRecord]
    results: Comparison | None
    colour_of: dict[str, Colour]


def compare_as_page(
    directories: Sequence[Path], page: Path, *, markdown_file: Path | None = None, csv_file: Path | None = None
) -> Comparison:
    """Compare the runs with results.json and write a page of all runs. Raises RefusedError for a
    directory without results.json and metrics.jsonl, a repeated directory, missing plotly, or a file that cannot be
    written."""
    plotly_source()  # fails before the runs are read
    judged = [path for path in directories if (path / RESULTS_FILE).is_file()]
    for path in directories:
        if path not in judged and not (path / METRICS_FILE).is_file():
            raise RefusedError(
                f"{path} has neither {RESULTS_FILE} nor {METRICS_FILE}; allowed: directories of trp-scale pretrain, "
                "finetune, evaluate or probe"
            )
    comparison = Comparison(runs=[], sources=[], rows={})
    if judged or markdown_file is not None or csv_file is not None:
        comparison = compare(judged, markdown_file=markdown_file, csv_file=csv_file)
    named = dict(zip(names(directories), directories, strict=True))
    compared = ComparedRuns(
        runs={name: read_run(path) for name, path in named.items() if (path / METRICS_FILE).is_file()},
        results=replace(comparison, runs=[name for name, path in named.items() if path in judged]) if judged else None,
        colour_of=colours(named),
    )
    write_output(page, page_text(comparison_page(compared)), "--html ")
    return replace(comparison, files=[*comparison.files, page])


def comparison_page(compared: ComparedRuns) -> Page:
    count = len(compared.colour_of)
    sections = [*_results(compared), *_end_figures(compared), *_curves(compared), *_settings(compared)]
    return Page(
        kind="Comparison",
        title=f"{count} run{'s' * (count > 1)} side by side",
        lead=[shorten(", ".join(compared.colour_of), 1000)],
        sections=sections,
        made_of="Made by trp-scale compare.",
    )


def _results(compared: ComparedRuns) -> Iterator[PageSection]:
    if compared.results is not None:
        yield PageSection(
            name="results",
            title="Downstream results",
            look_for=("Whether a difference exceeds the seed noise: bold ones do, after correction for all tests."),
            blocks=[*result_tables(compared.results), Sentences(sentences=legend(compared.results))],
        )


def _end_figures(compared: ComparedRuns) -> Iterator[PageSection]:
    """Build a table with one row per run: final loss of each task, and its cost."""
    runs = compared.runs
    if not runs:
        return
    figures = end_figures(runs)
    rows: list[list[str | Cell]] = [
        [Cell(text=name, colour=compared.colour_of[name]), run.state.word, *(row[number] for row in figures.values())]
        for number, (name, run) in enumerate(runs.items())
    ]
    yield PageSection(
        name="end",
        title="End figures",
        look_for="The run with the lowest final loss of the worst task, and its cost.",
        blocks=[Table(head=["run", "end", *figures], rows=rows, words=2, notes=[END_NOTE])],
    )


def _curves(compared: ComparedRuns) -> Iterator[PageSection]:
    plots = []
    for task in task_names(compared.runs)[:MOST_TASKS]:
        losses = {name: run.curves.losses.get(task) for name, run in compared.runs.items()}
        plots.append(_plot(compared, f"{task}: training loss", losses))
        for figure in dict.fromkeys(name for run in compared.runs.values() for name in run.curves.held_out):
            curves = {name: run.curves.held_out.get(figure, {}).get(task) for name, run in compared.runs.items()}
            plots.append(_plot(compared, f"{task}: held-out {to_words(figure)}", curves))
    plots = [plot.limit_lines() for plot in plots if plot.lines]
    if plots:
        yield PageSection(
            name="curves",
            title="Curves",
            look_for=("Where runs diverge. A run has the same colour in all plots; a click on its name hides it."),
            blocks=plots,
        )


def _plot(compared: ComparedRuns, title: str, curves: Mapping[str, Curve | None]) -> Plot:
    lines = [
        Line(name=name, points=curve.points(), colour=compared.colour_of[name])
        for name, curve in curves.items()
        if curve is not None and len(curve)
    ]
    return Plot(title=title, lines=lines)


def _settings(compared: ComparedRuns) -> Iterator[PageSection]:
    settings = {name: flat(run.settings) for name, run in compared.runs.items() if run.settings}
    if len(settings) < 2:
        return
    rows = []
    for setting in dict.fromkeys(name for flags in settings.values() for name in flags):
        if any(setting not in flags for flags in settings.values()):
            continue  # belongs to a kind or hook that another run lacks; `kind` and `hooks` differ then
        values = [json.dumps(flags[setting]) for flags in settings.values()]
        if len(set(values)) > 1:
            cells = [Cell(text=shorten(value.strip('"'), 300), code=True) for value in values]
            rows.append([Cell(text=setting, code=True), *cells])
    if rows:
        yield PageSection(
            name="settings",
            title="Settings that differ",
            look_for="All other differences between the runs are due to data, version or randomness.",
            blocks=[Table(head=["setting", *settings], rows=rows, words=1 + len(settings))],
        )
