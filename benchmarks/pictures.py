"""Pictures for docs/: the display of a run replayed from its metrics, its page in a browser, and loss curves.

    python benchmarks/pictures.py --run runs/tiny [--output docs/pictures] [--frames 20] [--browser chromium]
    python benchmarks/pictures.py --curves gpu.json [--output docs/pictures] [--browser chromium]
    python benchmarks/pictures.py --studies docs/studies

display.svg is one moving SVG without script or font. report_light.png, report_dark.png and report_phone.png are drawn
by Chromium or Chrome from a new page, with the packages plotly and playwright; without a browser they are left out.
curves.png has the section `curves` of benchmarks/gpu.py, worst_part.png the worst part of speech in two studies.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from PIL import Image
from rich.console import Console, RenderableType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.evaluation.figures.pictures import figure_class
from trp_scale.reporting.document import Line, Page, PageSection, Plot, colours, page_text
from trp_scale.reporting.record import Points, read_run
from trp_scale.reporting.run import run_page
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


BROWSERS = ("chromium", "chromium-browser", "google-chrome")

Views = Mapping[str, tuple[int, int, Literal["light", "dark"]]]
"""Name of the file: width and height of the window, and the scheme that the system asks for."""
VIEWS: Views = {
    "report_light": (1280, 1340, "light"),
    "report_dark": (1280, 1340, "dark"),
    "report_phone": (400, 1300, "light"),
}
CURVES: Views = {"curves": (1280, 1000, "light")}


@dataclass(kw_only=True)
class Options:
    """Draw the pictures of a run that has ended, or loss curves."""

    run: Path | None = None
    """Directory of the run."""
    curves: Path | None = None
    """JSON file of benchmarks/gpu.py --sections curves."""
    studies: Path | None = None
    """Directory of the reports trp_groups and trp_optimizers."""
    output: Path = Path("docs/pictures")
    """Directory of the pictures."""
    frames: int = 20
    """Frames of the display."""
    browser: str = ""
    """Program; empty = the first of chromium, chromium-browser and google-chrome that exists."""


def draw_display(run: Path, options: Options) -> Path:
    """Write the moving picture of the display."""
    path = options.output / "display.svg"
    path.write_text(svg(list(frames_of(run, options.frames))), encoding="utf-8")
    return path


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
    return StepRecord(tasks=tasks, **{key: line[key] for key in ("step", "loss", "lr", "grad_norm", "step_seconds")})


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


def curves_page(path: Path) -> Page:
    """Return a page with a plot for each item of the section `curves` in a JSON file of benchmarks/gpu.py."""
    document = json.loads(path.read_text(encoding="utf-8"))
    sections: list[PageSection] = []
    for item in (item for item in document["items"] if item["section"] == "curves" and item["figures"]):
        figures = item["figures"]
        curves = {name.removesuffix("_loss"): values for name, values in figures.items() if name.endswith("_loss")}
        lines = [
            Line(name=name, points=Points(steps=figures["step"], values=curves[name]), colour=colour)
            for name, colour in colours(curves).items()
        ]
        plot = Plot(title="loss", lines=lines, wide=True)
        sections.append(PageSection(name=f"curves-{len(sections)}", title=item["name"], blocks=[plot]))
    return Page(kind="benchmarks/gpu.py", title=document["device"], lead=[document["date"]], sections=sections)


def draw_pages(content: Page, views: Views, output: Path, program: str) -> Iterator[Path]:
    """Write the pictures of a page."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        page.write_text(page_text(content), encoding="utf-8")
        # Chromium starts as root, as in a container, without its sandbox alone; the page is our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (width, height, scheme) in views.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_function("[...document.querySelectorAll('.plot')].every(one => one.querySelector('.trace'))")
            path = output / f"{name}.png"
            # All colours stay: a palette of 256 would mix those of tasks.
            Image.open(io.BytesIO(tab.screenshot())).convert("RGB").save(path, optimize=True)
            context.close()
            yield path
        browser.close()


WORST_PART = {
    "Uncertainty": ("trp_groups", "uncertainty"),
    "DWA": ("trp_groups", "dwa"),
    "equal weights": ("trp_groups", "uniform"),
    "group DRO": ("trp_groups", "group_dro"),
    "minimax": ("trp_groups", "minimax_3"),
    "minimax, with Muon": ("trp_optimizers", "minimax_1_muon"),
    "GradNorm": ("trp_groups", "gradnorm"),
    "ordinary BERT": ("trp_groups", "bert"),
}
"""Study and variant by label."""


def draw_worst_part(studies: Path, output: Path) -> Path:
    """Plot the held-out loss of the worst part of speech: each of five runs, and their mean."""
    figure = figure_class()(figsize=(8, 3.6), layout="constrained")
    axes: Any = figure.subplots()
    for height, (label, (study, variant)) in enumerate(reversed(WORST_PART.items())):
        figures = json.loads((studies / study / "figures.json").read_text(encoding="utf-8"))["figures"]
        row = next(each for each in figures if each["judge"] == "held_out" and each["row"] == "worst")
        runs = [statistics.fmean(values) for values in row["values"][variant].values()]
        colour = "tab:blue" if label.startswith("minimax") else "tab:gray"
        axes.plot(runs, [height] * len(runs), "o", color=colour, alpha=0.35, markersize=5)
        axes.plot(statistics.fmean(runs), height, "D", color=colour, markersize=8)
        axes.annotate(f"{statistics.fmean(runs):.2f}", (max(runs), height), (9, -4), textcoords="offset points")
    axes.set_yticks(range(len(WORST_PART)), list(reversed(WORST_PART)))
    axes.set(xlabel="held-out loss of the worst part of speech, nats", xlim=(6.5, 9.3))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path = output / "worst_part.png"
    figure.savefig(path, dpi=120)
    return path


def main(options: Options) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    paths = [draw_display(options.run, options)] if options.run else []
    if options.studies:
        paths.append(draw_worst_part(options.studies, options.output))
    program = next(filter(None, map(shutil.which, [options.browser] if options.browser else BROWSERS)), None)
    if program is None:
        print(f"none of {', '.join(BROWSERS)} is on PATH: the page is not drawn; allowed: --browser PROGRAM")
    else:
        if options.run:
            paths += draw_pages(run_page(read_run(options.run)), VIEWS, options.output, program)
        if options.curves:
            paths += draw_pages(curves_page(options.curves), CURVES, options.output, program)
    for path in paths:
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
