"""A moving picture of the display, replayed from the metrics of a real run: one SVG, no script, no font to fetch.

python benchmarks/display_picture.py --run runs/tiny [--output docs/pictures/display.svg] [--frames 20]
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, RenderableType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.training.metrics import RunInfo, StepRecord, TaskRecord, read_metrics, worst_task
from trp_scale.training.progress import LiveDisplay
from trp_scale.training.report import read_summary

WIDTH, CHARACTER, LINE, MARGIN = 100, 8.4, 19.0, 14.0
"""Columns of the terminal; pixels of a character, of a line, and around them."""

SECONDS, AT_THE_END = 8.0, 2.0
"""How long the run takes in the picture, and how long its last frame stays."""

COLOURS = {
    "red": "#ff6b6b",
    "green": "#7bd88f",
    "magenta": "#c792ea",
    "cyan": "#6cc7e6",
    "yellow": "#e6c86c",
    "blue": "#7aa2f7",
}
TEXT, DIM, GROUND, UNFILLED = "#d8dee9", "#7f8794", "#1b1f27", "#3a404c"


@dataclass(kw_only=True)
class Arguments:
    """Draw the display of a run that has ended."""

    run: Path
    """Its directory."""
    output: Path = Path("docs/pictures/display.svg")
    """The picture."""
    frames: int = 20
    """So many."""


def draw(arguments: Arguments) -> None:
    """Write the picture."""
    frames = list(frames_of(arguments.run, arguments.frames))
    arguments.output.write_text(svg(frames), encoding="utf-8")
    print(
        f"{arguments.output}: {len(frames)} frames of {arguments.run}, {arguments.output.stat().st_size / 1e3:.0f} kB"
    )


def frames_of(run: Path, count: int) -> Iterator[list[list[tuple[str, str]]]]:
    """Each frame as lines of (text, style)."""
    config, summary = load_recipe(str(run / "config.yaml")), read_summary(run)
    lines = [line for line in read_metrics(run) if "tasks" in line]
    steps = config.training.steps
    positions = round(lines[0]["tokens_per_second"] * lines[0]["step_seconds"])
    info = RunInfo(
        positions_per_step=positions,
        images_per_step=config.batch.global_size if isinstance(config, ImagePretrainConfig) else 0,
        outside_tasks=tuple(lines[0]["outside_tasks"]),
        description=str(summary.get("description", "")),
    )
    now = [0.0]
    hidden = Console(file=io.StringIO(), force_terminal=True, width=WIDTH)
    shown = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, color_system="standard")
    display = LiveDisplay(steps, info, hidden, clock=lambda: now[0])
    wanted = {1 + round((len(lines) - 1) * number / (count - 1)) for number in range(count)}
    try:
        for number, line in enumerate(lines, 1):
            now[0] += line["step_seconds"]
            record = record_of(line)
            losses = {name: task.loss for name, task in record.tasks.items()}
            counts = {name: task.count for name, task in record.tasks.items()}
            display.update(record, line["tokens_per_second"], worst_task(losses, counts, info.outside_tasks))
            display.add_line(line)
            if number in wanted:
                yield rows_of(shown, display.draw())
    finally:
        display.close()


def record_of(line: Mapping[str, Any]) -> StepRecord:
    """A line of metrics as the loop would report it."""
    tasks = {
        name: TaskRecord(**{key: task[key] for key in ("loss", "weight", "count")})
        for name, task in line["tasks"].items()
    }
    return StepRecord(
        step=line["step"],
        loss=line["loss"],
        lr=line["lr"],
        grad_norm=line["grad_norm"],
        tasks=tasks,
        step_seconds=line["step_seconds"],
    )


def rows_of(console: Console, shown: RenderableType) -> list[list[tuple[str, str]]]:
    return [[(part.text, fill_of(part.style)) for part in line] for line in console.render_lines(shown, pad=False)]


def fill_of(style: Any) -> str:
    """Attributes of an SVG text."""
    if style is None:
        return f'fill="{TEXT}"'
    if style.color is None:
        fill = DIM if style.dim else TEXT
    else:
        seen = style.color.get_truecolor()
        fill = COLOURS.get(style.color.name, UNFILLED if max(seen) < 0x60 else seen.hex)
    return f'fill="{fill}"' + (' font-weight="bold"' if style.bold else "")


def svg(frames: Sequence[list[list[tuple[str, str]]]]) -> str:
    """The frames one after the other, for ever."""
    height = 2 * MARGIN + LINE * max(len(frame) for frame in frames)
    width = 2 * MARGIN + CHARACTER * WIDTH
    total = SECONDS + AT_THE_END
    each = SECONDS / len(frames)
    styles, groups = [], []
    for number, frame in enumerate(frames):
        begin, end = (
            100 * number * each / total,
            100.0 if number == len(frames) - 1 else 100 * (number + 1) * each / total,
        )
        before = "" if number == 0 else f"0%,{begin - 0.001:.3f}%{{opacity:0}}"
        after = "" if end == 100.0 else f"{end + 0.001:.3f}%,100%{{opacity:0}}"
        styles.append(
            f"@keyframes f{number}{{{before}{begin:.3f}%,{end:.3f}%{{opacity:1}}{after}}}"
            f".f{number}{{opacity:{int(number == len(frames) - 1)};animation:f{number} {total:g}s linear infinite}}"
        )
        groups.append(f'<g class="f{number}">{"".join(texts(frame))}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="the display of a run">'
        f"<style>text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"white-space:pre}}{''.join(styles)}"
        f"@media(prefers-reduced-motion:reduce){{g{{animation:none!important}}}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>{"".join(groups)}</svg>\n'
    )


def texts(frame: list[list[tuple[str, str]]]) -> Iterator[str]:
    """A text for each stretch of one style, at its column."""
    for number, row in enumerate(frame):
        column, y = 0, MARGIN + LINE * (number + 0.75)
        for text, fill in row:
            stripped = text.strip(" ")
            if stripped:
                x = MARGIN + CHARACTER * (column + len(text) - len(text.lstrip(" ")))
                escaped = stripped.replace("&", "&amp;").replace("<", "&lt;")
                length = math.floor(10 * CHARACTER * len(stripped)) / 10
                yield f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length}" {fill}>{escaped}</text>'
            column += len(text)


if __name__ == "__main__":
    draw(tyro.cli(Arguments))
