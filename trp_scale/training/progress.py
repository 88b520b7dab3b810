"""Progress display of rank 0: live on a terminal, plain lines elsewhere. Both show smoothed losses and the last lines
of metrics.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trp_scale.checkpoint.run_directory import METRICS_FILE
from trp_scale.config import Config, RefusedError
from trp_scale.console import Outlet
from trp_scale.training.metrics import RunInfo, StepRecord
from trp_scale.training.report import REPORT_WIDTH

PROGRESS_VARIABLE = "TRP_SCALE_PROGRESS"
"""Environment variable live, plain or off; overrides the terminal check, for launchers that pipe the output."""

PLAIN_SECONDS = 10.0
"""Time between two plain lines."""

SMOOTHING_SECONDS = 30.0
"""Time over which the live display estimates the remaining time."""

HORIZON = 20
"""Steps of the exponential moving average (bias-corrected) of displayed losses."""

POINTS = 64
"""Maximum number of points of a curve."""

BLOCKS = "▁▂▃▄▅▆▇█"

CURVE, WEIGHT = 24, 16
"""Characters of a task's curve, and of the bar of weight 1."""


@dataclass(kw_only=True)
class SparkLine:
    """Curve of a loss.

    Attributes:
        points: smoothed values at even distances.
        first: first value.
    """

    points: list[float] = field(default_factory=list)
    first: float = 0.0
    _sum: float = 0.0
    _weight: float = 0.0
    _seen: int = 0
    _stride: int = 1

    def add(self, value: float) -> None:
        """Add the loss of a step."""
        if not self._seen:
            self.first = value
        self._sum += (value - self._sum) / HORIZON
        self._weight += (1.0 - self._weight) / HORIZON
        self._seen += 1
        if self._seen % self._stride == 0:
            self.points.append(self.now)
        if len(self.points) == POINTS:
            self.points, self._stride = self.points[1::2], 2 * self._stride

    @property
    def now(self) -> float:
        """Smoothed loss."""
        return self._sum / self._weight

    @property
    def change(self) -> float:
        """Change of the smoothed loss since the first value."""
        return self.now - self.first

    def draw(self, width: int) -> str:
        """Return the curve as `width` block characters, scaled to its minimum and maximum."""
        values = [self.points[place * len(self.points) // width] for place in range(width)] if self.points else []
        low, high = min(values, default=0.0), max(values, default=0.0)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round(scale * (value - low))] for value in values)


class PlainDisplay:
    """Print progress lines every PLAIN_SECONDS, for logs and pipes.

    Args:
        steps: steps of the whole run.
        lines: False: messages and the report only.
    Attributes:
        curves: curves of the tasks that have occurred.
        record: record of the last step; None before the first.
        hook_lines: last line of each hook, such as "adversary: norm 0.12 effect 0.004".
    """

    def __init__(self, steps: int, info: RunInfo, console: Console | None = None, *, lines: bool = True) -> None:
        self.info, self.console = info, console or Console()
        self.curves: dict[str, SparkLine] = {}
        self.record: StepRecord | None = None
        self.hook_lines: dict[str, str] = {}
        self.worst: str | None = None
        self._steps, self._lines = steps, lines
        self._loss = SparkLine()
        self._speed = 0.0
        self._line: Mapping[str, Any] = {}
        self._validation: tuple[int, float] | None = None
        self._right: dict[str, float] = {}
        self._began = time.monotonic()
        self._paced: tuple[int, float] | None = None  # first displayed step (it may have compiled), and its time
        self._next = 0.0
        self._shown: list[str] = []

    def update(self, record: StepRecord, positions_per_second: float, worst_task: str | None) -> None:
        """Record a step and display it if an update is due."""
        self.record, self._speed, self.worst = record, positions_per_second, worst_task
        self._loss.add(record.loss)
        for name, task in record.tasks.items():
            if task.loss is not None:
                self.curves.setdefault(name, SparkLine()).add(task.loss)
        self.show_step(record.step)

    def show_step(self, step: int) -> None:
        """Print the lines of a step if PLAIN_SECONDS have passed or it is the last."""
        now = time.monotonic()
        if not self._lines or (now < self._next and step < self._steps):
            return
        self._next = now + PLAIN_SECONDS
        text = f"elapsed {timedelta(seconds=round(now - self._began))}"
        if self._paced is None:
            self._paced = step, now
        elif step > self._paced[0]:
            a_step = (now - self._paced[1]) / (step - self._paced[0])
            text += f"  left {timedelta(seconds=round(a_step * (self._steps - step)))}"
        self.message(f"step {step}/{self._steps}  {self.describe_step()}  {text}")
        before, self._shown = self._shown, list(self.describe_lines())
        for line in self._shown:
            if line not in before:
                self.message(f"  {line}")

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Record a written line of metrics."""
        self._line = {**self._line, **line}
        validation = line.get("validation") or {}
        if (loss := validation.get("loss")) is not None:
            self._validation = line["step"], loss
            right = {name: figures.get("accuracy") for name, figures in validation.get("tasks", {}).items()}
            self._right = {name: share for name, share in right.items() if share is not None}
        for hook, names in self.info.shown.items():
            values = line.get(hook) or {}
            figures = [f"{name.replace('_', ' ')} {values[name]:.4g}" for name in names if values.get(name) is not None]
            if figures:
                self.hook_lines[hook] = f"{hook}: {'  '.join(figures)}"

    def describe_step(self) -> str:
        """Return loss, worst task and speed (images/s for image runs, tokens/s otherwise) in one line."""
        assert self.record is not None, "a step was made"
        parts = [f"loss {self._loss.now:.4f}", f"lr {self.record.lr:.2e}"]
        if self.worst is not None and len(self.record.tasks) > 1:
            curve = self.curves[self.worst]
            change = f" ({curve.change:+.4f})" if len(curve.points) > 1 else ""
            parts.append(f"worst {self.worst} {curve.now:.4f}{change}")
        images = bool(self.info.images_per_step)
        speed = self.info.image_count(self._speed) if images else self._speed
        return "  ".join([*parts, f"{speed:,.0f} {'images' if images else 'tokens'}/s"])

    def describe_lines(self) -> Iterator[str]:
        """Yield lines about the last validation, memory, waits and hooks."""
        parts = []
        if self._validation is not None:
            parts.append(f"held out {self._validation[1]:.4f} at step {self._validation[0]}")
        if memory := self._line.get("peak_memory_bytes"):
            parts.append(f"memory {memory / 2**30:.1f} GiB")
        if (share := self._line.get("data_wait_share")) is not None:
            parts.append(f"waits for data {share:.0%}")
        if parts:
            yield "  ".join(parts)
        if self._right:
            yield "right of those held out: " + "  ".join(f"{name} {share:.1%}" for name, share in self._right.items())
        yield from self.hook_lines.values()

    def message(self, text: str) -> None:
        """Print a message."""
        # No line breaks at 80 columns: logs are searched.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, content: RenderableType) -> None:
        """Print the report."""
        console = self.console
        if not console.is_terminal:  # a log has no width; rich would wrap at 80 columns
            console = Console(file=console.file, width=max(REPORT_WIDTH, console.width))
        console.print(content)

    def close(self) -> None:
        """Release the terminal."""


class LiveDisplay(PlainDisplay):
    """Show a progress bar and a table of the tasks with loss curves and weight bars, redrawn in place four times a
    second."""

    def __init__(
        self,
        steps: int,
        info: RunInfo,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(steps, info, console)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            get_time=clock,
            speed_estimate_period=SMOOTHING_SECONDS,
            expand=True,
        )
        self._task = self._progress.add_task("steps", total=steps, completed=info.start_step)
        self._live = Live(get_renderable=self.draw, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()
        # Otherwise a run that fails without close() leaves the terminal without a cursor.
        atexit.register(self._live.stop)

    def show_step(self, step: int) -> None:
        # The thread of rich draws: a fast run pays only for this update, not for a redraw.
        self._progress.update(self._task, completed=step)

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()
        atexit.unregister(self._live.stop)

    def draw(self) -> RenderableType:
        """Return the current display."""
        record = self.record
        if record is None:
            return self._progress
        lines = [Text(line, style="dim") for line in self.describe_lines()]
        return Group(self._tasks(record), Text(self.describe_step()), *lines, self._progress)

    def _tasks(self, record: StepRecord) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(*(Text(name, style="dim") for name in ("task", "loss", "so far", "weight", "", "elements")))
        for name, task in record.tasks.items():
            style = "dim" if name in self.info.outside_tasks else ""
            if name == self.worst and len(record.tasks) > 1:
                style = "bold red"
            curve = self.curves.get(name)
            loss, drawn = (f"{curve.now:.4f}", curve.draw(CURVE)) if curve is not None else ("-", "")
            table.add_row(
                Text(name, style=style),
                Text(loss, style=style),
                Text(drawn, style=style),
                f"{task.weight:.4f}",
                ProgressBar(total=1.0, completed=min(1.0, task.weight), width=WEIGHT),
                Text(f"{task.count:,}"),
            )
        return table


def open_display(config: Config, info: RunInfo, run_dir: Path) -> PlainDisplay:
    """Open the display for the terminal, `logging.progress` and TRP_SCALE_PROGRESS.

    Raises:
        RefusedError: TRP_SCALE_PROGRESS is none of live, plain, off.
    """
    wish = os.environ.get(PROGRESS_VARIABLE, "")
    if wish not in ("", "live", "plain", "off"):
        raise RefusedError(
            f"{PROGRESS_VARIABLE} is {wish!r}; allowed: live, plain, off, or unset to choose by the terminal"
        )
    outlet: Any = Outlet(sys.stdout, f"the run continues: see {run_dir / METRICS_FILE}")
    console = Console(file=outlet, force_terminal=True if wish == "live" else None)
    shown = config.logging.progress and wish != "off"
    steps = config.training.steps
    if shown and (wish == "live" or (wish == "" and console.is_terminal and not console.is_dumb_terminal)):
        display: PlainDisplay = LiveDisplay(steps, info, console)
    else:
        display = PlainDisplay(steps, info, console, lines=shown)
    a_step = f"{info.images_per_step:,} images" if info.images_per_step else f"{info.positions_per_step:,} tokens"
    head = f"{info.description}; {a_step} a step; {run_dir}"
    display.message(head.removeprefix("; "))
    return display
