"""Page of one run: metrics, pictures, speed, incidents, settings and next commands.

Metrics of hooks get titles and hints from config/registry.py if they are described there.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trp_scale.checkpoint.run_directory import PICTURES
from trp_scale.config import Config
from trp_scale.config.registry import MetricPlot, MetricsDescription, metrics_description
from trp_scale.console import GIB, Cell, Colour, Table, figure_text
from trp_scale.errors import shorten
from trp_scale.reporting.document import (
    INSTALL,
    Block,
    Commands,
    Facts,
    Line,
    Page,
    PageSection,
    Pictures,
    Plot,
    Sentences,
    can_draw,
    colours,
    page_text,
)
from trp_scale.reporting.record import MOST_POINTS, OWN_STEP, Curve, Points, RunRecord, Tree, leaves
from trp_scale.storage.files import write_text
from trp_scale.training.report import (
    RANDOM_MASKS,
    describe_outcome,
    describe_start,
    held_out_name,
    marked_task,
    task_table,
    to_words,
)
from trp_scale.training.rundir import continue_command
from trp_scale.training.sinks import LARGEST_PICTURE, list_pictures

FEW_LINES = 3
POINTS_OF_MANY = 100
"""Points per curve in a plot of more than FEW_LINES lines: noise of one task would hide the others."""


def task_lines(curves: Mapping[str, Curve], colour_of: Mapping[str, Colour], worst: str | None = None) -> list[Line]:
    """Return a line for each non-empty curve, the largest final value first; the worst task is emphasised."""
    most = MOST_POINTS if len(curves) <= FEW_LINES else POINTS_OF_MANY
    drawn = {name: curve.points(most) for name, curve in curves.items() if len(curve)}
    order = sorted(drawn, key=lambda name: -_end(drawn[name]))
    return [
        Line(name=name, points=drawn[name], colour=colour_of[name], emphasis="worst" if name == worst else "")
        for name in order
    ]


def _end(points: Points) -> float:
    last = points.values[-max(1, len(points.values) // 10) :]
    return sum(last) / len(last)


def task_colours(run: RunRecord) -> dict[str, Colour]:
    """Assign a colour to each task, for all plots and tables of a run."""
    names = [*run.history.tasks, *(name for curves in run.curves.held_out.values() for name in curves)]
    return colours(name for name in names if name)


def tasks_section(run: RunRecord) -> PageSection:
    """Plot training and held-out losses of each task, and list them in a table."""
    worst, colour_of = marked_task(run.history), task_colours(run)
    several = len(run.history.tasks) > 1
    plots = [Plot(title="Training loss", lines=task_lines(run.curves.losses, colour_of, worst))]
    titles = {"loss": f"Held-out loss ({RANDOM_MASKS})" if run.history.lesson is not None else "Held-out loss"}
    for name, curves in sorted(run.curves.held_out.items(), key=lambda item: item[0] != "loss"):
        if lines := task_lines({task: curve for task, curve in curves.items() if task}, colour_of, worst):
            unit = "share" if name == "accuracy" else ""
            plots.append(Plot(title=titles.get(name, f"Held-out {to_words(name)}"), lines=lines, unit=unit))
    look_for = "How far each loss has fallen, and whether the held-out loss falls too."
    if several:
        look_for = (
            "Whether the loss of the worst task (thick line) falls: that is the goal of the run. Held-out losses that "
            "rise while training losses fall indicate overfitting."
        )
    return PageSection(
        name="losses",
        title="Losses of the tasks" if several else "Loss",
        look_for=look_for,
        blocks=[*(plot.limit_lines() for plot in plots if plot.lines), task_table(run.history, colour_of)],
    )


def optimizer_section(run: RunRecord) -> PageSection:
    """Plot total loss, learning rate and gradient norm."""
    loss, rate, norm, held_out = colours(("loss", "lr", "grad_norm", "held out")).values()
    fields, plots = run.curves.fields, list[Block]()
    if len(run.history.tasks) > 1 and len(total := fields.get("loss", Curve())):
        lines = [Line(name="training", points=total.points(), colour=loss)]
        note = "Weighted sum that is minimised; it also changes with the weights."
        plots.append(Plot(title="Total loss", lines=lines, note=note))
        if len(curve := run.curves.held_out.get("loss", {}).get("", Curve())):
            lines = [Line(name="held out", points=curve.points(), colour=held_out)]
            plots.append(Plot(title=held_out_name(run.history).capitalize(), lines=lines))
    for name, title, colour in (("lr", "Learning rate", rate), ("grad_norm", "Norm of the gradient", norm)):
        values = fields.get(name)
        if isinstance(values, Curve) and len(values):
            plots.append(Plot(title=title, lines=[Line(name=name, points=values.points(), colour=colour)]))
    look_for = (
        "A growing or jumping gradient norm often precedes a rising loss. The band of a long run shows spikes that its "
        "mean hides."
    )
    return PageSection(name="optimizer", title="Optimizer", look_for=look_for, blocks=plots)


BALANCER = "balancer"
"""Hook that sets the task weights; they are drawn from the figures of the tasks."""

NOTICE = "notice"

MOST_OTHERS = 24
"""Plots of a hook without descriptions; further metrics are only named."""


def method_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield a section for each described hook, and one for all others."""
    hooks = {BALANCER: {}, **run.curves.hooks}
    others: list[Block] = []
    for name, tree in hooks.items():
        first = list(_weights(run)) if name == BALANCER else []
        description = metrics_description(name)
        blocks = [*first, *_blocks(run, name, tree, description)]
        # Skip hooks that log only constants, such as the balancer of a run with one task.
        if not any(isinstance(block, Plot) for block in blocks):
            continue
        if description is None:
            others += [Facts(facts=[("hook", name)]), *blocks]
        else:
            yield PageSection(
                name=f"hook-{_anchor(name)}",
                title=description.title,
                look_for=description.look_for,
                blocks=blocks,
            )
    if others:
        look_for = "Metrics of hooks without a description; see the documentation of the hook."
        yield PageSection(name="other-metrics", title="Other metrics", look_for=look_for, blocks=others)


def _anchor(name: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in name).lower()


def _weights(run: RunRecord) -> Iterator[Plot]:
    """Yield the plot of task weights if they change."""
    curves = run.curves.weights
    if len(curves) > 1 and any(curve.varies for curve in curves.values()):
        moving = {name: curve for name, curve in curves.items() if name not in run.history.outside_tasks}
        note = "At steps where the task occurred."
        lines = task_lines(moving, task_colours(run), marked_task(run.history))
        if lines:
            yield Plot(title="Weight of each task", lines=lines, note=note, wide=True).limit_lines()


def _blocks(run: RunRecord, hook: str, tree: Tree, description: MetricsDescription | None) -> Iterator[Block]:
    described = description.plots if description else ()
    constants = {name for name, curves in tree.items() if not any(curve.varies for curve in leaves(curves))}
    # A constant line is drawn if another line of its plot varies.
    drawn = {name for plot in described if set(plot.names) & tree.keys() - constants for name in plot.names}
    constants -= {*drawn, OWN_STEP}
    # The top of the page shows a notice while the last line contains it.
    facts = [(to_words(name), text) for name, text in run.curves.words.get(hook, {}).items() if name != NOTICE]
    facts += [(to_words(name), _constant(tree[name])) for name in tree if name in constants and _is_curve(tree[name])]
    if facts:
        yield Facts(facts=[(name, shorten(text)) for name, text in facts])
    known = {name for plot in described for name in plot.names} | {OWN_STEP, *constants}
    rest = [name for name in tree if name not in known]
    plots = [*described, *(MetricPlot(title=to_words(name).capitalize(), names=(name,)) for name in rest[:MOST_OTHERS])]
    for plot in plots:
        if lines := _lines(run, tree, [name for name in plot.names if name not in constants]):
            yield Plot(
                title=plot.title, lines=lines, unit=plot.unit, log=plot.log, edge=plot.edge, note=plot.note
            ).limit_lines()
    if len(rest) > MOST_OTHERS:
        yield Sentences(sentences=[f"Not drawn: {shorten(', '.join(rest[MOST_OTHERS:]), 2000)}"])


def _is_curve(value: object) -> bool:
    return isinstance(value, Curve) and len(value) > 0


def _constant(curve: Curve) -> str:
    value = curve.values[-1]
    return figure_text(int(value) if value.is_integer() else value)


def _lines(run: RunRecord, tree: Mapping[str, Any], names: Sequence[str]) -> list[Line]:
    """Return one line per name; an object gives one line per task or field."""
    tasks = task_colours(run)
    curves: dict[str, Curve] = {}
    for name in names:
        value = tree.get(name)
        curves |= {to_words(name): value} if isinstance(value, Curve) else dict(value or {})
    curves = {name: curve for name, curve in curves.items() if _is_curve(curve)}
    if curves and set(curves) <= set(tasks):
        return task_lines(curves, tasks, marked_task(run.history))
    colour_of = colours(curves)
    return [Line(name=name, points=curve.points(), colour=colour_of[name]) for name, curve in curves.items()]


PAGE_FILE = "report.html"

MOST_PICTURES = 12
"""Pictures that are embedded in a page."""

MOST_INCIDENTS = 200
"""Listed incidents; the latest ones if there are more."""

LONG = 20
"""Factor over the median step time above which steps are not drawn: compilation of the first step would flatten the
rest."""

MOST_SKIPPED = 50
"""Listed skipped steps; the latest ones if there are more."""


def write_page(run: RunRecord, drawn: Sequence[Path] = ()) -> str:
    """Write RUN/report.html. Return its path, or the reason why it was not written: plotly is missing, or the directory
    is not writable.

    Args:
        drawn: PNG files to show in addition to RUN/pictures.
    """
    path = run.run_dir / PAGE_FILE
    if not can_draw():
        return f"{path}: not written, the page needs plotly: {INSTALL}"
    try:
        write_text(path, page_text(run_page(run, drawn)))
    except OSError as error:
        return f"{path}: not written ({error.strerror})"
    return f"page: {path}"


def run_page(run: RunRecord, drawn: Sequence[Path] = ()) -> Page:
    """Build the page of a run; sections without data are omitted.

    Args:
        drawn: PNG files to show in addition to RUN/pictures.
    """
    sections = [tasks_section(run), optimizer_section(run), *method_sections(run)]
    sections += [pictures_section(run, drawn), speed_section(run), incidents_section(run)]
    look_for = "Ready to paste; replace words in capitals."
    commands = [Commands(commands=list(next_commands(run)))]
    sections += [
        settings_section(run),
        PageSection(name="next", title="What to do next", look_for=look_for, blocks=commands),
    ]
    what = [str(run.summary.get("description", "")), f"recipe {run.changed.recipe}" if run.changed.recipe else ""]
    kind = "Fine-tuning report" if run.fine_tuning else "Pre-training report"
    return Page(
        kind=shorten(" · ".join(part for part in (kind, *what) if part), 300),
        title=run.name,
        state=run.state.word,
        mood=run.state.mood,
        lead=[run.state.sentence, *describe_outcome(run.history)],
        tiles=tiles(run),
        sections=sections,
        made_of=f"Made by trp-scale report from {run.run_dir.resolve()}, up to step {run.history.last_step:,}.",
    )


def tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return key figures as (name, value, detail)."""
    history = run.history
    steps = run.settings.get("training", {})
    total = steps.get("steps") if isinstance(steps, dict) else None
    figures = [("steps", f"{history.last_step:,}", f"of {total:,}" if isinstance(total, int) else "")]
    if history.loss_end is not None:
        figures.append(("loss", figure_text(history.loss_end), f"from {figure_text(history.loss_start)}"))
    if (worst := marked_task(history)) is not None:
        task = history.tasks[worst]
        figures.append((f"worst task: {worst}", figure_text(task.end), f"from {figure_text(task.start)}"))
    if history.held_out:
        step, loss = list(history.held_out.items())[-1]
        figures.append((held_out_name(history), figure_text(loss), f"after step {step:,}"))
    if (speed := _speed(run)) is not None:
        figures.append(speed)
    if history.data_wait_share is not None:
        figures.append(("waiting for data", figure_text(history.data_wait_share, unit="share"), "of the steps' time"))
    if history.peak_memory_bytes:
        figures.append(("peak memory", f"{history.peak_memory_bytes / GIB:.2f} GiB", "rank 0"))
    return figures


def _speed(run: RunRecord) -> tuple[str, str, str] | None:
    for name, unit in (("images_per_second", "images / s"), ("tokens_per_second", "tokens / s")):
        curve = run.curves.fields.get(name)
        if isinstance(curve, Curve) and len(curve):
            return ("speed", f"{statistics.median(curve.values):,.0f}", f"{unit}, median")
    return None


def pictures_section(run: RunRecord, drawn: Sequence[Path] = ()) -> PageSection:
    """Show the PNG files of RUN/pictures in order of their steps, and `drawn`."""
    folders: dict[Path, list[tuple[str, bytes]]] = {}  # by step, or by file if there is no step
    for path in dict.fromkeys(path.resolve() for path in [*list_pictures(run.run_dir / PICTURES), *drawn]):
        content = path.read_bytes()
        if content.startswith(b"\x89PNG") and len(content) <= LARGEST_PICTURE:
            step = path.parent if path.parent.parent.name == PICTURES else path
            folders.setdefault(step, []).append((_caption(path), content))
    steps = list(folders.values())
    most = max(2, MOST_PICTURES // max(map(len, steps), default=1))
    if len(steps) > most:  # evenly spaced, including the first and the last
        steps = [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]
    pictures = [picture for step in steps for picture in step]
    look_for = "Predictions and masks, oldest first: whether masks follow the image, and what changes."
    return PageSection(
        name="pictures", title="Pictures", look_for=look_for, blocks=[Pictures(pictures=pictures)] if pictures else []
    )


def _caption(path: Path) -> str:
    folder = "" if path.parent.name == PICTURES else f"{path.parent.name} / "
    return f"{folder}{path.stem.replace('_', ' ')}"


def speed_section(run: RunRecord) -> PageSection:
    """Plot throughput, time waiting for data, and memory."""
    images = "images_per_second" in run.curves.fields
    pace = (
        ("images_per_second", "images / s", "") if images else ("tokens_per_second", "tokens / s", ", padding included")
    )
    blocks: list[Block] = [
        *_speed_plot(run, pace[0], "Throughput", unit=pace[1], note=f"Over all ranks{pace[2]}."),
        *_speed_plot(run, "data_wait_share", "Waiting for data", unit="share", note="Share of a step's time, rank 0."),
        *_speed_plot(run, "step_seconds", "Time of a step", unit="s", most=LONG),
        *_speed_plot(run, "peak_memory_bytes", "Memory", unit="GiB", note="Peak so far, rank 0.", scale=1 / GIB),
        *_speed_plot(run, "model_flops_utilisation", "Share of the devices' bf16 peak", unit="share"),
    ]
    more = describe_start(run.history, run.summary)
    return PageSection(
        name="speed",
        title="Speed and memory",
        look_for=(
            "If waiting for data exceeds a few per cent, raise --data.workers. Memory that keeps growing will end the "
            "run."
        ),
        blocks=[*blocks, *([Sentences(sentences=more)] if more and blocks else [])],
    )


def _speed_plot(
    run: RunRecord, name: str, title: str, *, unit: str, note: str = "", scale: float = 1.0, most: float | None = None
) -> Iterator[Plot]:
    """Yield the plot of a field, unless it is missing or always 0.

    Args:
        most: omit values above this multiple of the median; the note counts them.
    """
    curve = run.curves.fields.get(name)
    if isinstance(curve, Curve) and len(curve) and any(curve.values):
        if most is not None:
            usual, longest = curve.below(most * statistics.median(curve.values)), max(curve.values)
            if left_out := len(curve) - len(usual):
                note += f"Not drawn: {left_out:,} above {most:g} times the median, the longest of "
                note += f"{longest:,.1f} {unit}."
            curve = usual
        line = Line(name=name, points=curve.multiply(scale).points(), colour=colours(FIELDS)[name])
        yield Plot(title=title, lines=[line], unit=unit, note=note, from_zero=True)


FIELDS = (
    *("tokens_per_second", "data_wait_share", "step_seconds", "peak_memory_bytes"),
    *("images_per_second", "model_flops_utilisation"),
)


def incidents_section(run: RunRecord) -> PageSection:
    kinds = Counter(str(incident.get("kind", "")) for incident in run.incidents)
    kinds.update({"skipped step": len(run.curves.skipped)} if run.curves.skipped else {})
    rows: list[list[str | Cell]] = []
    for incident in run.incidents[-MOST_INCIDENTS:]:
        step = incident.get("step")
        more = {name: value for name, value in incident.items() if name not in ("at", "step", "kind")}
        details = ", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in more.items()
        )
        order = float(step) if isinstance(step, int) and abs(step) < 1 << 53 else None
        rows.append(
            [
                Cell(text=shorten(str(incident.get("kind", ""))), strong=True),
                shorten(details, 240),
                Cell(text="-" if order is None else f"{step:,}", order=order),
                shorten(str(incident.get("at", "")), 40),
            ]
        )
    blocks: list[Block] = []
    if kinds:
        blocks.append(Facts(facts=[(shorten(kind), f"{count:,}") for kind, count in kinds.items()]))
    if run.curves.skipped:
        latest = run.curves.skipped[-MOST_SKIPPED:]
        which = f" (the last {MOST_SKIPPED})" if len(run.curves.skipped) > MOST_SKIPPED else ""
        blocks.append(Sentences(sentences=[f"Skipped steps{which}: {', '.join(f'{step:,}' for step in latest)}"]))
    if rows:
        left_out = len(run.incidents) > MOST_INCIDENTS
        notes = [f"The latest {MOST_INCIDENTS} of {len(run.incidents):,}."] if left_out else []
        blocks.append(Table(head=["kind", "what", "step", "at"], rows=rows, words=2, notes=notes))
    look_for = "Single incidents are harmless; many of one kind or file have a common cause."
    return PageSection(name="incidents", title="Incidents", look_for=look_for, blocks=blocks)


def settings_section(run: RunRecord) -> PageSection:
    """List settings that differ from the recipe."""
    changed = run.changed
    rows = [
        [
            Cell(text=name, code=True),
            *(Cell(text="-" if value is None else shorten(_value(value), 300), code=True) for value in values),
        ]
        for name, *values in changed.settings
    ]
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(head=["setting", "recipe", "this run"], rows=rows, words=3))
    if changed.problem:
        blocks.append(Sentences(sentences=[f"Not compared with a recipe: {changed.problem}"]))
    look_for = (
        f"Settings that differ from {changed.recipe}, including those that the run chose, such as batch.micro_size. "
        "config.yaml contains all settings."
    )
    return PageSection(name="settings", title="Settings that differ from the recipe", look_for=look_for, blocks=blocks)


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def next_commands(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (purpose, command)."""
    path, modules = shlex.quote(str(run.run_dir.resolve())), _modules(run)
    if run.state.word == "running":
        yield "Follow the running run:", f"trp-scale watch {path}{modules}"
    if run.state.goes_on and run.command:
        where = run.start.directory or "its original working directory"
        command = continue_command(run.command, run.run_dir.resolve())
        yield f"Resume from the newest checkpoint, in {where} and with the same launcher:", command
    yield "Check the run: complete checkpoints, and where it would resume:", f"trp-scale doctor {path}"
    if run.fine_tuning:
        return
    yield "Measure every task's loss on held-out rows:", f"trp-scale evaluate --run {path}{modules}"
    if run.config is not None:
        if run.config.reads == "text":
            tuned = f"trp-scale finetune --recipe glue --from {path} --data.path GLUE --task all"
            yield "Fine-tune its encoder on GLUE, over seeds:", f"{tuned} --seeds 3 --run_dir NEW_RUN{modules}"
            probe = f"trp-scale probe --from {path} --data GLUE --task sst2"
        else:
            drawn = f"trp-scale report --run {path} --pictures {path}/{PICTURES}{modules}"
            yield "Draw reconstructions, positions and masks, and add them to this page:", drawn
            tuned = f"trp-scale finetune --recipe classification_tiny --from {path} --data.path SHARDS"
            yield (
                "Fine-tune its encoder to classify images, over seeds:",
                f"{tuned} --seeds 3 --run_dir NEW_RUN{modules}",
            )
            probe = f"trp-scale probe --from {path} --data SHARDS --method knn"
        yield "Measure its frozen encoder:", f"{probe}{modules}"
        to = export_format(run.config)
        what = "the model for transformers" if to == "hf" else "the encoder for timm or torch"
        yield f"Export {what}:", f"trp-scale export --run {path} --to {to} --output EXPORTED{modules}"
    other = f"trp-scale compare {path} OTHER_RUN --html compared.html{modules}"
    yield "Compare it with another run, results and curves:", other


def export_format(config: Config) -> Literal["hf", "timm"]:
    """Return the library that can load an exported model unchanged: transformers supports BERT, and an MAE whose
    encoder reads only visible patches."""
    vision = getattr(config, "vision", None)
    is_mae = getattr(vision, "tokens", "") == "visible" and getattr(vision, "positions", "") == "absolute"
    return "hf" if vision is None or (is_mae and getattr(vision, "decoder", "") == "transformer") else "timm"


def _modules(run: RunRecord) -> str:
    names = run.settings.get("modules")
    return "".join(f" --module {shlex.quote(str(name))}" for name in names) if isinstance(names, list) else ""
