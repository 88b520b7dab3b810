"""`trp-scale study report`: results of a study as Markdown, LaTeX and HTML, with a plot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.console import Cell, Table
from trp_scale.evaluation.figures.pictures import figure_class
from trp_scale.reporting.document import Page, PageSection, Pictures, Sentences, page_text
from trp_scale.reporting.paired_tests import LEVEL
from trp_scale.reporting.results import RESULTS_FILE
from trp_scale.storage.files import write_json, write_text
from trp_scale.studies.execute import NodeState, find_blocked, has_finished, read_states
from trp_scale.studies.graph import SAME_STEPS, TIME, TUNING_SEED, Graph
from trp_scale.studies.outcome import ALL, JudgeRow, Outcome, describe_outcome, read_outcome, verdict
from trp_scale.training.metrics import RunHistory, read_history


def write_report(graph: Graph, output: Path, command: str) -> str:
    """Write README.md, report.tex, report.html, figures.json and outcome.png. Return the Markdown."""
    output.mkdir(parents=True, exist_ok=True)
    outcome = read_outcome(graph)
    sentences = describe_outcome(graph, outcome)
    picture = output / "outcome.png"
    has_picture = draw_outcome(graph, outcome, picture)
    tables = list(_tables(graph, outcome, read_states(graph), command))
    lead = [_describe_source(graph), *([graph.scale.note] if graph.scale.note else [])]
    lines = [f"# {graph.study.title}", *lead, "**Outcome.**", "\n".join(f"- {sentence}" for sentence in sentences)]
    if has_picture:
        lines.append(f"![{outcome.outcome}](outcome.png)")
    text = "\n\n".join([*lines, *(table.to_markdown() for table in tables)]) + "\n"
    write_text(output / "README.md", text)
    write_text(output / "report.tex", "\n\n".join(table.to_latex() for table in tables) + "\n")
    drawn = [Pictures(pictures=[(str(outcome.outcome), picture.read_bytes())])] if has_picture else []
    first = PageSection(name="outcome", title="Outcome", blocks=[Sentences(sentences=sentences), *drawn])
    sections = [
        PageSection(name=f"table-{number}", title=table.title, blocks=[table]) for number, table in enumerate(tables)
    ]
    page = Page(kind="Study", title=graph.study.title, lead=lead, sections=[first, *sections], made_of=command)
    write_text(output / "report.html", page_text(page))
    write_json(output / "figures.json", _figures(graph, outcome))
    return text


def _describe_source(graph: Graph) -> str:
    source = graph.study.source
    where = f"{source.paper} (arXiv:{source.arxiv}), {source.place}{f'; {source.note}' if source.note else ''}"
    return f"{where}. {graph.study.question}"


def _tables(graph: Graph, outcome: Outcome, states: Mapping[str, NodeState | None], command: str) -> Iterator[Table]:
    groups: dict[str, list[JudgeRow]] = {}
    for key in outcome.figures:
        groups.setdefault(key.judge, []).append(key)
    for judge, keys in groups.items():
        yield _figures_table(graph, outcome, judge, keys)
    if outcome.outcome in outcome.cells and len(outcome.cells[outcome.outcome]) > 1:
        yield _differences_table(graph, outcome)
    if any(variant.paper for variant in graph.variants.values()):
        yield _paper_table(graph)
    yield _cost_table(graph, outcome)
    yield _settings_table(graph, states, command)


def _figures_table(graph: Graph, outcome: Outcome, judge: str, keys: Sequence[JudgeRow]) -> Table:
    rows = []
    best = {key: _best_variant(outcome, key) for key in keys}
    for name in outcome.variants:
        cells = {key: outcome.cells[key].get(name) for key in keys}
        if any(cells.values()):
            row: list[str | Cell] = [graph.title(name)]
            for key, cell in cells.items():
                text = "-" if cell is None else f"{cell.spread.mean:.4f}"
                text += "" if cell is None or cell.spread.half is None else f" ± {cell.spread.half:.4f}"
                row.append(Cell(text=text, strong=best[key] == name))
            rows.append(row)
    metrics = {key.row: outcome.metrics[key] for key in keys}
    kinds = list(dict.fromkeys(f"{row.metric}{', lower is better' * row.lower_is_better}" for row in metrics.values()))
    splits = ", ".join(dict.fromkeys(row.split for row in metrics.values()))
    runs = sorted({cell.spread.runs for key in keys for cell in outcome.cells[key].values()})
    seeds = " to ".join(dict.fromkeys(str(count) for count in (runs[0], runs[-1])))
    notes = [
        f"{'; '.join(kinds)}; measured on {splits}",
        f"mean ± half of its {LEVEL:.0%} interval over {seeds} pre-training seeds; bold: best mean",
        *_describe_variance(outcome, keys),
    ]
    if counts := [f"{name} {row.count:,}" for name, row in metrics.items() if row.count is not None]:
        notes.append(f"measured on: {', '.join(counts)}")
    if judge in graph.scale.judges and (left_out := graph.scale.judges[judge].left_out):
        notes.append(f"not in average and worst: {', '.join(left_out)}")
    head: list[str | Cell] = [""]
    head += [Cell(text=key.row, strong=key == outcome.outcome) for key in keys]
    return Table(
        title=f"Figures: {judge if judge != ALL else 'all judges of the outcome'}", head=head, rows=rows, notes=notes
    )


def _describe_variance(outcome: Outcome, keys: Sequence[JudgeRow]) -> Iterator[str]:
    spreads = [cell.spread for key in keys for cell in outcome.cells[key].values() if cell.spread.within is not None]
    between = [part.between for part in spreads if part.between is not None]
    within = [part.within for part in spreads if part.within is not None]
    if between and within:
        yield (
            f"standard deviation, mean over cells: over pre-training seeds {statistics.fmean(between):.4f}, over "
            f"judging seeds {statistics.fmean(within):.4f}"
        )


def _best_variant(outcome: Outcome, key: JudgeRow) -> str:
    row = outcome.metrics[key]
    return max(outcome.cells[key], key=lambda name: row.sign * outcome.cells[key][name].spread.mean)


def _differences_table(graph: Graph, outcome: Outcome) -> Table:
    key = outcome.outcome
    rows: list[list[str | Cell]] = []
    for name, cell in outcome.cells[key].items():
        difference = cell.difference
        if difference is None or difference.half is None or difference.test is None:
            continue
        low, high = difference.value - difference.half, difference.value + difference.half
        seen = verdict(cell, outcome.metrics[key]).removesuffix(" seen") or "-"
        if name == graph.study.ground:
            seen = "the untrained encoder"
        rows.append(
            [
                graph.title(name),
                f"{difference.value:+.4f}",
                f"{low:+.4f} to {high:+.4f}",
                f"{difference.test.p:.3g}",
                "-" if difference.corrected is None else f"{difference.corrected:.3g}",
                f"{difference.visible:.4f}",
                Cell(text=seen, strong=seen in ("better", "worse")),
            ]
        )
    notes = [
        f"{key}, paired by seed with {graph.title(graph.study.baseline)}; two-sided paired t-test",
        "visible: smallest difference that the test detects with a power of 80 % at the corrected level",
    ]
    head = ["", "difference", "interval", "p", "p (Holm)", "visible", "seen"]
    return Table(title="Differences to the baseline", head=head, rows=rows, notes=notes)


def _paper_table(graph: Graph) -> Table:
    """Figures that the paper prints for its own models and data."""
    columns = list(dict.fromkeys(name for variant in graph.variants.values() for name in variant.paper))
    rows = [
        [variant.title, *(f"{variant.paper[name]:g}" if name in variant.paper else "-" for name in columns)]
        for variant in graph.variants.values()
        if variant.paper
    ]
    return Table(
        title=f"What the paper prints ({graph.study.source.place})",
        head=["", *columns],
        rows=rows,
        notes=["other models, data and steps: do not compare single values with the figures above"],
    )


def _cost_table(graph: Graph, outcome: Outcome) -> Table:
    seconds: dict[str, float] = {}
    runs: dict[str, list[RunHistory]] = {}
    for name in outcome.variants:
        paths = [graph.path(f"runs/{name}/seed_{seed}") for seed in range(graph.scale.seeds)]
        histories = [read_history(path) for path in paths if (path / METRICS_FILE).is_file()]
        timed = [history.seconds_of_step for history in histories if history.seconds_of_step is not None]
        if timed and graph.variants[name.removesuffix(TIME)].trained:
            seconds[name], runs[name] = statistics.median(timed), histories
    base = seconds.get(graph.study.baseline)
    rows = [
        [
            graph.title(name),
            f"{histories[0].last_step:,}",
            f"{1000 * seconds[name]:.1f}",
            "-" if base is None else f"{seconds[name] / base:.2f}",
            f"{statistics.fmean(history.training_seconds for history in histories) / 60:.2f}",
            str(len(histories)),
        ]
        for name, histories in runs.items()
    ]
    notes = [
        "ms a step: CPU time on a CPU, which excludes other load, and wall time on a GPU; median over logged steps, "
        "then over runs",
        "training minutes: wall time, mean over runs",
    ]
    if "time" in graph.scale.budgets:
        notes.append(
            f"equal time: steps that take the baseline's time, from that ratio; a ratio within {SAME_STEPS:.0%} of 1 "
            "needs no extra run"
        )
    head = ["", "steps", "ms a step", "over baseline", "training minutes", "runs"]
    return Table(title="Cost", head=head, rows=rows, notes=notes)


def _settings_table(graph: Graph, states: Mapping[str, NodeState | None], command: str) -> Table:
    scale, started = graph.scale, [state for state in states.values() if state is not None]
    rows = [
        ("command", command),
        (
            "pre-training seeds",
            f"0 to {scale.seeds - 1}: initial weights, data order and masks; shared by all variants",
        ),
        ("recipe", scale.recipe),
        ("common settings", _flags(scale.settings)),
    ]
    for name, variant in graph.variants.items():
        settings = {**variant.settings, **scale.variant_settings.get(name, {})}
        rows.append((variant.title, _flags(settings) if variant.trained else "untrained: initial weights"))
    rows += [(f"data {name}", f"{data.command} {_flags(data.flags)}") for name, data in scale.data.items()]
    rows += [
        (f"judge {name}", f"{judge.command} {_flags(judge.flags)}; {judge.seeds} seeds a run")
        for name, judge in scale.judges.items()
    ]
    rows.append(_tuning_row(graph))
    failed = [(f"failed: {state.node}", state.reason) for state in started if state.status == "failed"]
    finished = sum(map(has_finished, started))
    rows.append(("runs", f"{finished} of {len(states)} finished, {len(failed)} failed"))
    seconds, processor_seconds = (
        sum(getattr(state, name) for state in started) for name in ("seconds", "processor_seconds")
    )
    rows.append(("hours", f"{seconds / 3600:.2f} of commands, {processor_seconds / 3600:.2f} of processors"))
    rows += failed
    causes = Counter(find_blocked(graph, states).values())
    rows += [(f"not run for {cause}", str(count)) for cause, count in causes.items()]
    return Table(title="How it was run", head=["what", "how"], rows=rows)


def _tuning_row(graph: Graph) -> tuple[str, str]:
    """Return what was tuned, and the chosen value of each variant; a dash before all values are judged."""
    tuning, texts = graph.scale.tuning, []
    if tuning is None:
        return "tuning of runs", "none"
    for name in graph.trained_variants():
        directory = f"judged/{tuning.judge}/tuning/{name}"
        judged = all((graph.path(f"{directory}/{value:g}") / RESULTS_FILE).is_file() for value in tuning.values)
        value = f"{graph.choose_value(tuning, directory):g}" if judged else "-"
        texts.append(f"{graph.variants[name].title} {value}")
    return (
        f"{tuning.setting} of runs",
        f"from {tuning.tried} by {tuning.row} of {tuning.judge} on validation rows, seed {TUNING_SEED}, with "
        f"{_flags(tuning.flags)}: {', '.join(texts)}",
    )


def _figures(graph: Graph, outcome: Outcome) -> dict[str, object]:
    """All figures in machine-readable form."""
    return {
        "study": graph.study.title,
        "outcome": {"judge": outcome.outcome.judge, "row": outcome.outcome.row},
        "baseline": graph.study.baseline,
        "figures": [
            {
                "judge": key.judge,
                "row": key.row,
                "metric": outcome.metrics[key].metric,
                "split": outcome.metrics[key].split,
                "lower_is_better": outcome.metrics[key].lower_is_better,
                "values": {name: {str(seed): values for seed, values in seeds.items()} for name, seeds in row.items()},
            }
            for key, row in outcome.figures.items()
        ],
    }


def _flags(flags: Mapping[str, object]) -> str:
    texts = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in flags.items()}
    return " ".join(f"--{name} {text}" for name, text in texts.items()) or "as in the recipe"


def draw_outcome(graph: Graph, outcome: Outcome, path: Path) -> bool:
    """Plot the outcome row: mean and interval of each variant, and a dot per run; along an axis if the variants have
    numbers. Return False if no run has been judged."""
    cells = outcome.cells.get(outcome.outcome, {})
    if not cells:
        return False
    names = list(cells)
    numbers = {name: graph.variants[name.removesuffix(TIME)].at for name in names}
    along = [name for name in names if numbers[name] is not None] if graph.study.axis else []
    figure = figure_class()(figsize=(7, 4 if along else 1.1 + 0.42 * len(names)), layout="constrained")
    axes: Any = figure.subplots()
    row = outcome.metrics[outcome.outcome]
    label = f"{outcome.outcome}: {row.metric}"
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
    axes.set_yticks(range(len(names)), [graph.title(name) for name in reversed(names)])
    if baseline := outcome.cells[outcome.outcome].get(graph.study.baseline):
        axes.axvline(baseline.spread.mean, color="tab:red", linewidth=0.8, alpha=0.6)


def _curve(graph: Graph, outcome: Outcome, axes: Any, names: list[str]) -> None:
    cells = outcome.cells[outcome.outcome]
    for timed in (False, True):
        points = sorted(
            (graph.variants[name.removesuffix(TIME)].at or 0.0, name) for name in names if name.endswith(TIME) == timed
        )
        if points:
            axes.errorbar(
                [at for at, _ in points],
                [cells[name].spread.mean for _, name in points],
                yerr=[cells[name].spread.half or 0.0 for _, name in points],
                fmt="o-",
                capsize=4,
                label="equal time" if timed else "equal steps",
            )
    axes.legend()
