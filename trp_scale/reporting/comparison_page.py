"""`trp-scale compare --html`: curves, final figures, settings and results of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.config.loader import flat
from trp_scale.console import Cell, Colour, Table
from trp_scale.errors import RefusedError, shorten
from trp_scale.reporting.comparison import (
    Comparison,
    compare,
    legend,
    names,
    result_tables,
    task_names,
    training_table,
    write_output,
)
from trp_scale.reporting.document import (
    Block,
    Line,
    Page,
    PageSection,
    Plot,
    Sentences,
    colours,
    page_text,
    plotly_source,
)
from trp_scale.reporting.record import RunRecord, read_run
from trp_scale.reporting.results import RESULTS_FILE
from trp_scale.training.report import to_words

MOST_TASKS = 24
"""Tasks that get plots."""


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
    runs = {name: read_run(path) for name, path in named.items() if (path / METRICS_FILE).is_file()}
    results = replace(comparison, runs=[name for name, path in named.items() if path in judged]) if judged else None
    write_output(page, page_text(comparison_page(runs, results, colours(named))), "--html ")
    return replace(comparison, files=[*comparison.files, page])


def comparison_page(runs: Mapping[str, RunRecord], results: Comparison | None, colour_of: Mapping[str, Colour]) -> Page:
    """Build the page.

    Args:
        runs: those with metrics, by name.
        results: comparison of those with results.json; `None` if none has.
        colour_of: colours of all runs.
    """
    blocks: dict[str, list[Block]] = {
        "results": [] if results is None else [*result_tables(results), Sentences(sentences=legend(results))],
        "end": [training_table(runs, colour_of)] if runs else [],
        "curves": list(_curves(runs, colour_of)),
        "settings": list(_settings({name: flat(run.settings) for name, run in runs.items() if run.settings})),
    }
    sections = [
        PageSection(name=name, title=title, look_for=look_for, blocks=blocks[name])
        for name, (title, look_for) in SECTIONS.items()
    ]
    return Page(
        kind="Comparison",
        title=f"{len(colour_of)} run{'s' * (len(colour_of) > 1)} side by side",
        lead=[shorten(", ".join(colour_of), 1000)],
        sections=sections,
        made_of="Made by trp-scale compare.",
    )


SECTIONS = {
    "results": (
        "Downstream results",
        "Whether a difference exceeds the seed noise: bold ones do, after correction for all tests.",
    ),
    "end": ("End figures", "The run with the lowest final loss of the worst task, and its cost."),
    "curves": (
        "Curves",
        "Where runs diverge. A run has the same colour in all plots; a click on its name hides it.",
    ),
    "settings": (
        "Settings that differ",
        "All other differences between the runs are due to data, version or randomness.",
    ),
}
"""Title and hint of each section."""


def _curves(runs: Mapping[str, RunRecord], colour_of: Mapping[str, Colour]) -> Iterator[Plot]:
    for task in task_names(runs)[:MOST_TASKS]:
        losses = {name: run.curves.losses.get(task) for name, run in runs.items()}
        titled = {f"{task}: training loss": losses}
        for figure in dict.fromkeys(name for run in runs.values() for name in run.curves.held_out):
            curves = {name: run.curves.held_out.get(figure, {}).get(task) for name, run in runs.items()}
            titled[f"{task}: held-out {to_words(figure)}"] = curves
        for title, curves in titled.items():
            drawn = {name: curve for name, curve in curves.items() if curve is not None and len(curve)}
            lines = [Line(name=name, points=curve.points(), colour=colour_of[name]) for name, curve in drawn.items()]
            if lines:
                yield Plot(title=title, lines=lines).limit_lines()


def _settings(settings: Mapping[str, Mapping[str, object]]) -> Iterator[Table]:
    """Yield a table of the settings that differ, if any; `settings`: flat, by run."""
    rows = []
    for setting in dict.fromkeys(name for flags in settings.values() for name in flags):
        if any(setting not in flags for flags in settings.values()):
            continue  # belongs to a kind or hook that another run lacks; `kind` and `hooks` differ then
        values = [json.dumps(flags[setting]) for flags in settings.values()]
        if len(set(values)) > 1:
            cells = [Cell(text=shorten(value.strip('"'), 300), code=True) for value in values]
            rows.append([Cell(text=setting, code=True), *cells])
    if rows:
        yield Table(head=["setting", *settings], rows=rows, words=1 + len(settings))
