"""The page of one run: its figures, the sections of its metrics (metric_sections.py), pictures, speed, incidents and
settings, and what to do next, as commands."""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from trp_scale.checkpoint.run_directory import PICTURES
from trp_scale.config import Config
from trp_scale.errors import shorten
from trp_scale.reporting.curves import Curve
from trp_scale.reporting.document import (
    INSTALL,
    Block,
    Commands,
    Facts,
    Page,
    PageSection,
    Pictures,
    Sentences,
    can_draw,
    page_text,
)
from trp_scale.reporting.figures import Line, Plot, colours
from trp_scale.reporting.metric_sections import method_sections, optimizer_section, tasks_section
from trp_scale.reporting.record import RunRecord
from trp_scale.storage.files import write_text
from trp_scale.table import GIB, Cell, Table, figure_text
from trp_scale.training.report import describe_outcome, describe_start, held_out_name, marked_task
from trp_scale.training.rundir import continue_command
from trp_scale.training.sinks import LARGEST_PICTURE, list_pictures

PAGE_FILE = "report.html"

MOST_PICTURES = 12
"""Pictures on a page, which is one file."""

MOST_INCIDENTS = 200
"""Incidents of which the page has a row; of more the latest."""

LONG = 20
"""Times the median. A step that took longer is not drawn: others would lie on the axis if the first one compiled."""

MOST_SKIPPED = 50
"""Skipped steps that are listed; of more the latest."""


def write_page(run: RunRecord, drawn: Sequence[Path] = ()) -> str:
    """Write RUN/report.html; gives the line that says where it is, or why it is not there: without plotly, and where a
    run directory takes no files, the report is its text alone.

    Args:
        drawn: PNG files to show beside those of the run directory.
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
    """Build the page of a run; missing records have no section.

    Args:
        drawn: PNG files to show beside those of the run directory.
    """
    sections = [tasks_section(run), optimizer_section(run), *method_sections(run)]
    sections += [pictures_section(run, drawn), speed_section(run), incidents_section(run)]
    sections += [settings_section(run), next_section(run)]
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
    """The figures that matter most: (name, value, beside it)."""
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
    """PNG files of RUN/pictures, by the steps in their names, and those that were drawn just now."""
    folders: dict[Path, list[tuple[str, bytes]]] = {}  # of a step each, or of files without one
    for path in dict.fromkeys(path.resolve() for path in [*list_pictures(run.run_dir / PICTURES), *drawn]):
        content = path.read_bytes()
        if content.startswith(b"\x89PNG") and len(content) <= LARGEST_PICTURE:
            step = path.parent if path.parent.parent.name == PICTURES else path
            folders.setdefault(step, []).append((_caption(path), content))
    steps = list(folders.values())
    most = max(2, MOST_PICTURES // max(map(len, steps), default=1))
    if len(steps) > most:  # evenly over time, the first and the last among them
        steps = [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]
    pictures = [picture for step in steps for picture in step]
    look_for = "What is predicted and what is hidden, oldest first: whether masks follow the image, and what changes."
    return PageSection(
        name="pictures", title="Pictures", look_for=look_for, blocks=[Pictures(pictures=pictures)] if pictures else []
    )


def _caption(path: Path) -> str:
    folder = "" if path.parent.name == PICTURES else f"{path.parent.name} / "
    return f"{folder}{path.stem.replace('_', ' ')}"


def speed_section(run: RunRecord) -> PageSection:
    """Throughput, waiting for data, memory."""
    images = "images_per_second" in run.curves.fields
    pace = (
        ("images_per_second", "images / s", "") if images else ("tokens_per_second", "tokens / s", ", padding included")
    )
    blocks: list[Block] = [
        *_speed_plot(run, pace[0], "Throughput", unit=pace[1], note=f"Over all ranks{pace[2]}."),
        *_speed_plot(run, "data_wait_share", "Waiting for data", unit="share", note="Share of a step's time, rank 0."),
        *_speed_plot(run, "step_seconds", "Time of a step", unit="s", most=LONG),
        *_speed_plot(run, "peak_memory_bytes", "Memory", unit="GiB", note="Largest so far, rank 0.", scale=1 / GIB),
        *_speed_plot(run, "model_flops_utilisation", "Share of the devices' bf16 peak", unit="share"),
    ]
    more = describe_start(run.history, run.summary)
    return PageSection(
        name="speed",
        title="Speed and memory",
        look_for=(
            "More than a few per cent of waiting for data call for more --data.workers. Memory that keeps growing will "
            "end the run."
        ),
        blocks=[*blocks, *([Sentences(sentences=more)] if more and blocks else [])],
    )


def _speed_plot(
    run: RunRecord, name: str, title: str, *, unit: str, note: str = "", scale: float = 1.0, most: float | None = None
) -> Iterator[Plot]:
    """The plot of a field, in the same colour on every page; none where it has no value or is 0 all the time.

    Args:
        most: times the median: values above are left out, and the note says so.
    """
    curve = run.curves.fields.get(name)
    if isinstance(curve, Curve) and len(curve) and any(curve.values):
        if most is not None:
            usual, longest = curve.below(most * statistics.median(curve.values)), max(curve.values)
            if left_out := len(curve) - len(usual):
                note += f"Left out: {left_out:,} of more than {most:g} times the median, the longest of "
                note += f"{longest:,.1f} {unit}."
            curve = usual
        line = Line(name=name, points=curve.multiply(scale).points(), colour=colours(FIELDS)[name])
        yield Plot(title=title, lines=[line], unit=unit, note=note, from_zero=True)


FIELDS = (
    *("tokens_per_second", "data_wait_share", "step_seconds", "peak_memory_bytes"),
    *("images_per_second", "model_flops_utilisation"),
)


def incidents_section(run: RunRecord) -> PageSection:
    """Return the section on incidents during the run."""
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
    look_for = "Single ones are survived; many of one kind, or of one file, have a cause that is worth finding."
    return PageSection(name="incidents", title="Incidents", look_for=look_for, blocks=blocks)


def settings_section(run: RunRecord) -> PageSection:
    """Settings that are not the recipe's."""
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
        f"What is not as in {changed.recipe}. What a run chooses where a recipe leaves it open, as batch.micro_size, "
        "is listed, too; config.yaml has all settings."
    )
    return PageSection(name="settings", title="Settings that differ from the recipe", look_for=look_for, blocks=blocks)


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def next_section(run: RunRecord) -> PageSection:
    """Commands with this run's path."""
    commands = list(next_commands(run))
    look_for = "Each is ready to be pasted; words in capitals are yours to fill in."
    return PageSection(name="next", title="What to do next", look_for=look_for, blocks=[Commands(commands=commands)])


def next_commands(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(what for, command)."""
    path, modules = shlex.quote(str(run.run_dir.resolve())), _modules(run)
    if run.state.word == "running":
        yield "Follow it while it goes on:", f"trp-scale watch {path}{modules}"
    if run.state.goes_on and run.command:
        where = run.start.directory or "where it was started"
        command = continue_command(run.command, run.run_dir.resolve())
        yield f"Go on from its newest checkpoint, in {where} and under the same launcher:", command
    yield "Examine the run: which checkpoints are whole, where it would go on:", f"trp-scale doctor {path}"
    if run.fine_tuning:
        return
    yield "Measure every task's loss on held-out rows:", f"trp-scale evaluate --run {path}{modules}"
    if run.config is not None:
        commands = text_commands if run.config.reads == "text" else image_commands
        yield from ((what, f"{command}{modules}") for what, command in commands(path))
        to = export_format(run.config)
        what = "the model, as transformers reads it" if to == "hf" else "the encoder, for timm or torch alone"
        yield f"Take away {what}:", f"trp-scale export --run {path} --to {to} --output EXPORTED{modules}"
    other = f"trp-scale compare {path} OTHER_RUN --html compared.html{modules}"
    yield "Compare it with another run, results and curves:", other


def export_format(config: Config) -> Literal["hf", "timm"]:
    """Return the library that a model can be exported to unchanged: transformers has BERT, and the MAE whose encoder
    sees visible patches alone."""
    vision = getattr(config, "vision", None)
    is_mae = getattr(vision, "tokens", "") == "visible" and getattr(vision, "positions", "") == "absolute"
    return "hf" if vision is None or (is_mae and getattr(vision, "decoder", "") == "transformer") else "timm"


def text_commands(path: str) -> Iterator[tuple[str, str]]:
    """Commands that judge an encoder of text."""
    finetune = f"trp-scale finetune --recipe glue --from {path} --data.path GLUE --task all --seeds 3 --run_dir NEW_RUN"
    yield "Fine-tune its encoder on GLUE, over seeds:", finetune
    yield "Measure its frozen encoder:", f"trp-scale probe --from {path} --data GLUE --task sst2"


def image_commands(path: str) -> Iterator[tuple[str, str]]:
    """Commands that judge an encoder of images."""
    drawn = f"trp-scale report --run {path} --pictures {path}/{PICTURES}"
    yield "Draw what it reconstructs, its positions and masks, and have them on this page:", drawn
    yield "Measure its frozen encoder:", f"trp-scale probe --from {path} --data SHARDS --method knn"
    tuned = f"trp-scale finetune --recipe classification_tiny --from {path} --data.path SHARDS --seeds 3"
    yield "Fine-tune its encoder to classify images, over seeds:", f"{tuned} --run_dir NEW_RUN"


def _modules(run: RunRecord) -> str:
    """--module of a run with methods from outside."""
    names = run.settings.get("modules")
    return "".join(f" --module {shlex.quote(str(name))}" for name in names) if isinstance(names, list) else ""
