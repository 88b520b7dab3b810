"""`trp-scale compare`: results of several runs, or final losses and speeds of pre-training runs; as a page also curves
and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.config.loader import flat
from trp_scale.console import GIB, Cell, Colour, Table, number_cell
from trp_scale.errors import RefusedError, shorten
from trp_scale.reporting.comparison import (
    Comparison,
    compare_results,
    legend,
    names,
    result_tables,
    to_csv,
    to_markdown,
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
from trp_scale.reporting.results import RESULTS_FILE, read_results
from trp_scale.training.report import marked_task, to_words

END_NOTE = (
    "Losses: means over the last tenth of a run's steps, weighted by elements; bold: the lowest. Losses with different "
    "masks, targets or tokens are not comparable."
)

MOST_TASKS = 24
"""Tasks that get plots."""


def compare(
    runs: Sequence[Path], *, html: Path | None = None, markdown: Path | None = None, csv: Path | None = None
) -> Comparison:
    """Compare the results of the runs, and write the files that are given. Without results.json, compare the final
    losses and speeds of pre-training runs. An HTML page may have both kinds of runs.

    Raises:
        RefusedError: a directory without results.json among others that have it, or for a page without metrics.jsonl
            too; a repeated directory; missing plotly; a file that cannot be written.
    """
    if html is not None:
        return _compare_as_page(runs, html, markdown=markdown, csv=csv)
    if not runs:
        raise RefusedError("no run is given; expected: one or more directories with results.json or metrics.jsonl")
    named = dict(zip(names(runs), runs, strict=True))
    outputs = {path: text for path, text in ((markdown, to_markdown), (csv, to_csv)) if path is not None}
    if any((path / METRICS_FILE).is_file() for path in runs) and not any(
        (path / RESULTS_FILE).is_file() for path in runs
    ):
        if outputs:
            raise RefusedError(f"{next(iter(outputs))}: no results.json in {runs[0]}; allowed: --html FILE, or neither")
        training = training_table({name: read_run(path) for name, path in named.items()})
        return Comparison(runs=list(named), sources=[], rows={}, training=training)
    comparison = compare_results({name: read_results(path) for name, path in named.items()})
    for path, text in outputs.items():
        write_output(path, text(comparison))
    return replace(comparison, files=list(outputs))


def _compare_as_page(runs: Sequence[Path], html: Path, **outputs: Path | None) -> Comparison:
    """Compare the runs with results.json and write a page of all runs."""
    plotly_source()  # fails before the runs are read
    judged = [path for path in runs if (path / RESULTS_FILE).is_file()]
    for path in runs:
        if path not in judged and not (path / METRICS_FILE).is_file():
            raise RefusedError(
                f"{path} has neither {RESULTS_FILE} nor {METRICS_FILE}; allowed: directories of trp-scale pretrain, "
                "finetune, evaluate or probe"
            )
    comparison = Comparison(runs=[], sources=[], rows={})
    if judged or any(path is not None for path in outputs.values()):
        comparison = compare(judged, **outputs)
    named = dict(zip(names(runs), runs, strict=True))
    logged = {name: read_run(path) for name, path in named.items() if (path / METRICS_FILE).is_file()}
    results = replace(comparison, runs=[name for name, path in named.items() if path in judged]) if judged else None
    write_output(html, page_text(comparison_page(logged, results, colours(named))), "--html ")
    return replace(comparison, files=[*comparison.files, html])


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


def training_table(runs: Mapping[str, RunRecord], colour_of: Mapping[str, Colour] | None = None) -> Table:
    """Return the final figures of pre-training runs, a column for each run. `colour_of`: colours on a page."""
    rows: list[list[str | Cell]] = [["end", *(run.state.word for run in runs.values())]]
    rows += ([name, *cells] for name, cells in end_figures(runs).items())
    head = [Cell(text=name, colour=(colour_of or {}).get(name)) for name in runs]
    return Table(head=["", *head], rows=rows, notes=[END_NOTE])


def task_names(runs: Mapping[str, RunRecord]) -> list[str]:
    """Return the names of all runs' tasks."""
    return list(dict.fromkeys(task for run in runs.values() for task in run.history.tasks))


def end_figures(runs: Mapping[str, RunRecord]) -> dict[str, list[Cell]]:
    """Return the final losses, the speed and the cost of runs with metrics by name, a cell for each run. The lowest
    losses are bold, and each run's worst task is marked."""
    histories = [run.history for run in runs.values()]
    worst = [history.tasks.get(history.worst_task or "") for history in histories]
    losses: dict[str, list[float | None]] = {"worst task": [task.end if task else None for task in worst]}
    for name in task_names(runs):
        tasks = [history.tasks.get(name) for history in histories]
        losses[name] = [task.end if task else None for task in tasks]
    losses["held-out loss"] = [history.held_out.get(max(history.held_out, default=0)) for history in histories]
    waiting = [history.data_wait_share for history in histories]
    others: dict[str, list[float | None]] = {
        "its elements": [task.count if task else None for task in worst],
        "steps": [history.last_step for history in histories],
        "tokens/s": [history.tokens_per_second for history in histories],
        "images/s": [history.images_per_second for history in histories],
        "s a step": [history.step_seconds for history in histories],
        "data wait, %": [share if share is None else 100.0 * share for share in waiting],
        "memory, GiB": [history.peak_memory_bytes / GIB for history in histories],
    }
    figures = {"worst task": losses["worst task"], "its elements": others["its elements"], **losses, **others}
    if all(len(history.tasks) == 1 for history in histories):
        del figures["worst task"], figures["its elements"]
    if any(others["images/s"]):
        del figures["tokens/s"]
    known = {name: values for name, values in figures.items() if any(value is not None for value in values)}
    cells = {name: list(map(number_cell, values)) for name, values in known.items()}
    for name in losses.keys() & cells.keys():
        lowest = min(value for value in known[name] if value is not None)
        for number, (cell, history) in enumerate(zip(cells[name], histories, strict=True)):
            mark = " worst" * (marked_task(history) == name)
            strong = len(runs) > 1 and known[name][number] == lowest
            cells[name][number] = replace(cell, text=f"{cell.text}{mark}", strong=strong)
    return cells


def write_output(path: Path, text: str, flag: str = "") -> None:
    """Write an output file and create its directory. Raises RefusedError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{flag}{path} cannot be written: {error.strerror}") from error
