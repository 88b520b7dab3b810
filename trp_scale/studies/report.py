"""`trp-scale study report`: what a study found, as Markdown, LaTeX and HTML, with a picture and a sentence by rule."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.reporting.results import RESULTS_FILE
from trp_scale.reporting.statistics import LEVEL
from trp_scale.reporting.tables import Table, as_html, as_latex, as_markdown, cell
from trp_scale.storage.files import write_json, write_text
from trp_scale.studies.execute import State, blocked, states, totals
from trp_scale.studies.graph import SAME_STEPS, TIME, TUNING_SEED, Graph
from trp_scale.studies.outcome import ALL, Outcome, Place, described, read_outcome, sentences, title_of, verdict
from trp_scale.studies.pictures import draw
from trp_scale.studies.study import Tuning
from trp_scale.training.metrics import RunHistory, read_history

MARKS = {"better": "better", "worse": "worse", "no difference seen": "no difference", "": "-"}

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}th,td{padding:.25rem .7rem;text-align:right}
th:first-child,td:first-child{text-align:left}thead{border-bottom:2px solid}tbody tr:nth-child(even){background:#8881}
img{max-width:100%}:root{color-scheme:light dark}"""


def write_report(graph: Graph, output: Path, command: str) -> str:
    """Write README.md, report.tex, report.html, figures.json and the picture; gives the Markdown.

    Args:
        command: that ran the study.

    Raises:
        RefusedError: results that cannot be read.
    """
    output.mkdir(parents=True, exist_ok=True)
    outcome, found = read_outcome(graph), states(graph)
    said = sentences(graph, outcome)
    picture = draw(graph, outcome, output / "outcome.png")
    tables = list(_tables(graph, outcome, found, command))
    head, note = _head(graph), graph.scale.note
    lines = [
        f"# {graph.study.title}",
        head,
        *([note] if note else []),
        "**Outcome.**",
        "\n".join(f"- {one}" for one in said),
    ]
    if picture:
        lines.append(f"![{described(outcome.outcome)}](outcome.png)")
    text = "\n\n".join([*lines, *map(as_markdown, tables)]) + "\n"
    write_text(output / "README.md", text)
    write_text(output / "report.tex", "\n\n".join(map(as_latex, tables)) + "\n")
    write_text(output / "report.html", _page(graph, head, said, bool(picture), tables))
    write_json(output / "figures.json", _figures(graph, outcome))
    return text


def _head(graph: Graph) -> str:
    """Return the source and the question of the study."""
    source = graph.study.source
    where = f"{source.paper} (arXiv:{source.arxiv}), {source.place}{f'; {source.note}' if source.note else ''}"
    return f"{where}. {graph.study.question}"


def _tables(graph: Graph, outcome: Outcome, found: Mapping[str, State | None], command: str) -> Iterator[Table]:
    groups: dict[str, list[Place]] = {}
    for place in outcome.figures:
        groups.setdefault(place.judge, []).append(place)
    for judge, places in groups.items():
        yield _figures_table(graph, outcome, judge, places)
    if outcome.outcome in outcome.cells and len(outcome.cells[outcome.outcome]) > 1:
        yield _differences_table(graph, outcome)
    if any(variant.paper for variant in graph.variants.values()):
        yield _paper_table(graph)
    yield _cost_table(graph, outcome)
    yield _how(graph, found, command)


def _figures_table(graph: Graph, outcome: Outcome, judge: str, places: Sequence[Place]) -> Table:
    """Variants by rows of one judge."""
    rows = [[cell("")] + [cell(place.row, place == outcome.outcome) for place in places]]
    best = {place: _best(outcome, place) for place in places}
    for name in outcome.variants:
        cells = [outcome.cells[place].get(name) for place in places]
        if any(cells):
            rows.append(
                [cell(title_of(graph, name))]
                + [
                    cell("-" if one is None else _with_interval(one.spread.mean, one.spread.half), best[place] == name)
                    for place, one in zip(places, cells, strict=True)
                ]
            )
    metrics = {place.row: outcome.metrics[place] for place in places}
    kinds = list(dict.fromkeys(f"{row.metric}{', lower is better' * row.lower_is_better}" for row in metrics.values()))
    splits = ", ".join(dict.fromkeys(row.split for row in metrics.values()))
    runs = sorted({one.spread.runs for place in places for one in outcome.cells[place].values()})
    notes = [
        f"{'; '.join(kinds)}; measured on {splits}",
        f"mean and half of its {LEVEL:.0%} interval over {_listed(runs)} pre-training seeds; bold: the best mean",
        *_parts(outcome, places),
    ]
    if counts := [f"{row} {metrics[row].count:,}" for row in metrics if metrics[row].count is not None]:
        notes.append(f"measured on: {', '.join(counts)}")
    if judge in graph.scale.judges and (left_out := graph.scale.judges[judge].left_out):
        notes.append(f"average and worst leave out {', '.join(left_out)}")
    title = judge if judge != ALL else "all judges of the outcome"
    return Table(title=f"Figures: {title}", rows=rows, notes=notes)


def _parts(outcome: Outcome, places: Sequence[Place]) -> Iterator[str]:
    """Yield the variance parts of pre-training and judging seeds."""
    spreads = [one.spread for place in places for one in outcome.cells[place].values() if one.spread.within is not None]
    between = [one.between for one in spreads if one.between is not None]
    within = [one.within for one in spreads if one.within is not None]
    if between and within:
        yield (
            f"standard deviations, mean over cells: of pre-training seeds {statistics.fmean(between):.4f}, of judging "
            f"seeds {statistics.fmean(within):.4f}"
        )


def _best(outcome: Outcome, place: Place) -> str:
    row = outcome.metrics[place]
    return max(outcome.cells[place], key=lambda name: row.sign * outcome.cells[place][name].spread.mean)


def _differences_table(graph: Graph, outcome: Outcome) -> Table:
    place, baseline = outcome.outcome, graph.study.baseline
    rows = [[cell(text) for text in ("", "difference", "interval", "p", "p (Holm)", "visible", "seen")]]
    row = outcome.metrics[place]
    for name, one in outcome.cells[place].items():
        difference = one.difference
        if difference is None or difference.half is None or difference.test is None:
            continue
        low, high = difference.mean - difference.half, difference.mean + difference.half
        seen = MARKS[verdict(one, row)] if name != graph.study.ground else "the untrained encoder"
        rows.append(
            [
                cell(title_of(graph, name)),
                cell(f"{difference.mean:+.4f}"),
                cell(f"{low:+.4f} to {high:+.4f}"),
                cell(f"{difference.test.p:.3g}"),
                cell("-" if one.corrected is None else f"{one.corrected:.3g}"),
                cell("-" if difference.visible is None else f"{difference.visible:.4f}"),
                cell(seen, seen in ("better", "worse")),
            ]
        )
    notes = [
        f"{described(place)}, seed by seed against {title_of(graph, baseline)}; two-sided paired t-test",
        "visible: the smallest difference that such a test sees in four of five cases at the corrected level",
    ]
    return Table(title="Differences to the baseline", rows=rows, notes=notes)


def _paper_table(graph: Graph) -> Table:
    """The paper's own figures, which are of its models and data."""
    columns = list(dict.fromkeys(name for variant in graph.variants.values() for name in variant.paper))
    rows = [[cell("")] + [cell(name) for name in columns]]
    for variant in graph.variants.values():
        if variant.paper:
            texts = [f"{variant.paper[name]:g}" if name in variant.paper else "-" for name in columns]
            rows.append([cell(variant.title), *map(cell, texts)])
    source = graph.study.source
    return Table(
        title=f"What the paper prints ({source.place})",
        rows=rows,
        notes=["of its own models, data and steps: not to be compared with the figures above one by one"],
    )


def _cost_table(graph: Graph, outcome: Outcome) -> Table:
    """Steps, seconds of a step and hours of each variant's runs."""
    heads = ("", "steps", "ms a step", "over baseline", "training minutes", "runs")
    rows = [[cell(text) for text in heads]]
    seconds: dict[str, float] = {}
    of: dict[str, list[RunHistory]] = {}
    for name in outcome.variants:
        paths = [graph.path(f"runs/{name}/seed_{seed}") for seed in range(graph.scale.seeds)]
        histories = [read_history(path) for path in paths if (path / METRICS_FILE).is_file()]
        timed = [history.seconds_of_step for history in histories if history.seconds_of_step is not None]
        if timed and graph.variants[name.removesuffix(TIME)].trained:
            seconds[name], of[name] = statistics.median(timed), histories
    base = seconds.get(graph.study.baseline)
    for name, histories in of.items():
        minutes = statistics.fmean(history.training_seconds for history in histories) / 60
        rows.append(
            [
                cell(title_of(graph, name)),
                cell(f"{histories[0].last_step:,}"),
                cell(f"{1000 * seconds[name]:.1f}"),
                cell("-" if base is None else f"{seconds[name] / base:.2f}"),
                cell(f"{minutes:.2f}"),
                cell(str(len(histories))),
            ]
        )
    notes = [
        "ms: of processors on a CPU, so that what ran beside it does not count, and of time on a GPU; the median over "
        "logged steps of a run, then over runs",
        "minutes: of time, of a run's steps, their mean",
    ]
    if "time" in graph.scale.budgets:
        notes.append(
            f"equal time: as many steps as take the baseline's time by that ratio; within {SAME_STEPS:.0%} of it equal "
            "steps are equal time, and no further run is made"
        )
    return Table(title="Cost", rows=rows, notes=notes)


def _how(graph: Graph, found: Mapping[str, State | None], command: str) -> Table:
    """Return the table on how the study was run."""
    scale, sums = graph.scale, totals(found)
    rows = [
        [cell("what"), cell("how")],
        [cell("command"), cell(command)],
        [cell("pre-training seeds"), cell(f"0 to {scale.seeds - 1}: initial weights, order of data, masks; shared")],
        [cell("recipe"), cell(scale.recipe)],
        [cell("settings of all"), cell(_flags(scale.settings))],
    ]
    for name, variant in graph.variants.items():
        own = {**variant.settings, **scale.variant_settings.get(name, {})}
        rows.append([cell(variant.title), cell(_flags(own) if variant.trained else "untrained: as the seed draws it")])
    for name, made in scale.data.items():
        rows.append([cell(f"data {name}"), cell(f"{made.command} {_flags(made.flags)}")])
    for name, judge in scale.judges.items():
        rows.append([cell(f"judge {name}"), cell(f"{judge.command} {_flags(judge.flags)}; {judge.seeds} seeds a run")])
    rows += [[cell(text) for text in row] for row in _tuned(graph)]
    rows.append([cell("runs"), cell(f"{sums['finished']} of {sums['nodes']} finished, {sums['failed']} failed")])
    rows.append([cell("hours"), cell(f"{sums['hours']:.2f} of commands, {sums['processor_hours']:.2f} of processors")])
    for name, state in found.items():
        if state is not None and state.status == "failed":
            rows.append([cell(f"failed: {name}"), cell(state.reason)])
    left_out: dict[str, list[str]] = {}
    for name, cause in blocked(graph, found).items():
        left_out.setdefault(cause, []).append(name)
    rows += [[cell(f"not run for {cause}"), cell(str(len(names)))] for cause, names in left_out.items()]
    return Table(title="How it was run", rows=rows)


def _tuned(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the values that were tried, and the chosen one."""
    tuning = graph.scale.tuning
    if tuning is None:
        yield "tuning of runs", "none: their rates are those above, for all seeds"
    else:
        under = {name: f"judged/{tuning.judge}/tuning/{name}" for name in graph.timed()}
        yield (
            f"{tuning.setting} of runs",
            f"of {tuning.tried} by {tuning.row} of {tuning.judge} on rows held out for it, seed {TUNING_SEED}, with "
            f"{_flags(tuning.flags)}: {_chosen(graph, tuning, under)}",
        )
    for name, judge in graph.scale.judges.items():
        if judge.tuning is not None:
            under = {variant: f"judge_tuning/{name}/{variant}" for variant in graph.variants}
            yield (
                f"{judge.tuning.setting} of {name}",
                f"of {judge.tuning.tried} on the run of seed 0, with {_flags(judge.tuning.flags)}: "
                f"{_chosen(graph, judge.tuning, under)}",
            )


def _chosen(graph: Graph, tuning: Tuning, under: Mapping[str, str]) -> str:
    """Return the chosen value by variant; a dash if it is not judged yet."""

    def said(name: str) -> str:
        judged = all((graph.path(f"{under[name]}/{value:g}") / RESULTS_FILE).is_file() for value in tuning.values)
        return f"{graph.chosen(tuning, under[name], tuning.row):g}" if judged else "-"

    return ", ".join(f"{graph.variants[name].title} {said(name)}" for name in under)


def _figures(graph: Graph, outcome: Outcome) -> dict[str, object]:
    """All figures, for whoever wants to compute with them."""
    return {
        "study": graph.study.title,
        "outcome": {"judge": outcome.outcome.judge, "row": outcome.outcome.row},
        "baseline": graph.study.baseline,
        "figures": [
            {
                "judge": place.judge,
                "row": place.row,
                "metric": outcome.metrics[place].metric,
                "split": outcome.metrics[place].split,
                "lower_is_better": outcome.metrics[place].lower_is_better,
                "values": {name: {str(seed): values for seed, values in seeds.items()} for name, seeds in row.items()},
            }
            for place, row in outcome.figures.items()
        ],
    }


def _page(graph: Graph, head: str, said: Sequence[str], picture: bool, tables: Sequence[Table]) -> str:
    image = '<img src="outcome.png" alt="outcome">' if picture else ""
    items = "".join(f"<li>{html.escape(one)}</li>" for one in said)
    title = html.escape(graph.study.title)
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{html.escape(head)}</p>",
            f"<p>{html.escape(graph.scale.note)}</p>" if graph.scale.note else "",
            f"<h2>Outcome</h2><ul>{items}</ul>{image}",
            *map(as_html, tables),
            "</body></html>",
        ]
    )


def _with_interval(mean: float, half: float | None) -> str:
    return f"{mean:.4f}" if half is None else f"{mean:.4f} ± {half:.4f}"


def _flags(flags: Mapping[str, object]) -> str:
    return " ".join(f"--{name} {_value(value)}" for name, value in flags.items()) or "as the recipe"


def _value(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(numbers: Sequence[int]) -> str:
    return " to ".join(str(number) for number in dict.fromkeys((numbers[0], numbers[-1]))) if numbers else "0"
