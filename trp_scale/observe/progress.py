"""The live display on rank 0's terminal; plain lines where the output is not a terminal."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trp_scale.config import Config, RefusedError
from trp_scale.observe.metrics import METRICS_FILE
from trp_scale.observe.records import RunInfo, StepRecord

PROGRESS_VARIABLE = "TRP_SCALE_PROGRESS"
"""live, plain or off: overrides the choice by terminal, for launchers that pass the output through a pipe."""

PLAIN_SECONDS = 10.0
"""Time between two plain lines."""

SMOOTHING_SECONDS = 30.0
"""Steps of this long ago still count in the remaining time of the live display."""


logger = logging.getLogger(__name__)


class Outlet:
    """Standard output for as long as it can be written to; then silence.

    Its reader (head, tee, a terminal) may go, or its disk fill up, in the middle of a run. The run goes on: nobody has
    asked it to stop, and all that it would say is in its directory. (rich would end the process.)

    Args:
        stream: standard output; its file descriptor leads to nothing from then on, so that no line of a library ends
            the run either.
        run_dir: for the notice.
    """

    def __init__(self, stream: TextIO, run_dir: Path) -> None:
        self._stream, self._run_dir = stream, run_dir

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # what rich asks of a file: isatty, encoding, fileno

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._fall_silent(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fall_silent(error)

    def _fall_silent(self, error: OSError) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        path = self._run_dir / METRICS_FILE
        logger.warning("standard output cannot be written to (%s); the run goes on: see %s", error.strerror, path)


class Display(Protocol):
    """Shows how far the run is."""

    def update(self, record: StepRecord, tokens_per_second: float, worst_task: str | None) -> None: ...

    def message(self, text: str) -> None: ...

    def show(self, content: RenderableType) -> None: ...

    def close(self) -> None: ...


def status(record: StepRecord, tokens_per_second: float, worst_task: str | None) -> str:
    """Loss, worst task and speed in one line."""
    parts = [f"loss {record.loss:.4f}", f"lr {record.lr:.2e}"]
    if worst_task is not None:
        parts.append(f"worst {worst_task} {record.tasks[worst_task].loss:.4f}")
    return "  ".join([*parts, f"{tokens_per_second:,.0f} tokens/s"])


class PlainDisplay:
    """A line each PLAIN_SECONDS: for logs and pipes. `lines` False keeps messages and the report only."""

    def __init__(self, steps: int, start_step: int, lines: bool = True, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = steps
        self._start = start_step
        self._lines = lines
        self._began = time.monotonic()
        self._next = 0.0

    def update(self, record: StepRecord, tokens_per_second: float, worst_task: str | None) -> None:
        now = time.monotonic()
        if not self._lines or (now < self._next and record.step < self._steps):
            return
        self._next = now + PLAIN_SECONDS
        done = max(1, record.step - self._start)
        left = timedelta(seconds=round((now - self._began) / done * (self._steps - record.step)))
        self.message(f"step {record.step}/{self._steps}  {status(record, tokens_per_second, worst_task)}  left {left}")

    def message(self, text: str) -> None:
        # Logs are searched: a message is not to be broken at 80 columns.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, content: RenderableType) -> None:
        self._console.print(content)

    def close(self) -> None:
        """Nothing to end."""


class LiveDisplay:
    """Progress bar, and a table of the tasks with their losses as bars, redrawn in place four times a second."""

    def __init__(self, steps: int, info: RunInfo, console: Console | None = None) -> None:
        self._console = console or Console()
        self._outside = info.outside_tasks
        self._largest = 0.0
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=SMOOTHING_SECONDS,
            expand=True,
        )
        self._task = self._progress.add_task("steps", total=steps, completed=info.start_step)
        self._latest: tuple[StepRecord, float, str | None] | None = None
        self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()
        # A run that ends in an error without close() would leave the terminal without a cursor.
        atexit.register(self._live.stop)

    def update(self, record: StepRecord, tokens_per_second: float, worst_task: str | None) -> None:
        # The thread of rich draws what is current: a fast run pays for a store here, not for a redraw.
        self._latest = (record, tokens_per_second, worst_task)
        self._progress.update(self._task, completed=record.step)
        losses = [task.loss for task in record.tasks.values() if task.loss is not None]
        self._largest = max(self._largest, *losses) if losses else self._largest

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def show(self, content: RenderableType) -> None:
        self._console.print(content)

    def close(self) -> None:
        self._live.stop()
        atexit.unregister(self._live.stop)

    def _draw(self) -> RenderableType:
        if self._latest is None:
            return self._progress
        record, tokens_per_second, worst_task = self._latest
        return Group(
            self._tasks(record, worst_task), Text(status(record, tokens_per_second, worst_task)), self._progress
        )

    def _tasks(self, record: StepRecord, worst_task: str | None) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(*(Text(name, style="dim") for name in ("task", "loss", "", "weight", "elements")))
        for name, task in record.tasks.items():
            style = "bold red" if name == worst_task else "dim" if name in self._outside else ""
            # Bars share one scale, the largest loss seen, so that their lengths compare across tasks and over time.
            bar = ProgressBar(total=max(self._largest, 1e-9), completed=task.loss or 0.0, width=24)
            loss = "-" if task.loss is None else f"{task.loss:.4f}"
            table.add_row(
                Text(name, style=style), Text(loss, style=style), bar, f"{task.weight:.4f}", Text(f"{task.count:,}")
            )
        return table


def open_display(config: Config, info: RunInfo, run_dir: Path) -> Display:
    """The display that fits the terminal, `logging.progress` and TRP_SCALE_PROGRESS.

    Raises:
        RefusedError: TRP_SCALE_PROGRESS is none of live, plain, off.
    """
    wish = os.environ.get(PROGRESS_VARIABLE, "")
    if wish not in ("", "live", "plain", "off"):
        raise RefusedError(
            f"{PROGRESS_VARIABLE} is {wish!r}; allowed: live, plain, off, or unset to choose by the terminal"
        )
    outlet: Any = Outlet(sys.stdout, run_dir)
    console = Console(file=outlet, force_terminal=True if wish == "live" else None)
    shown = config.logging.progress and wish != "off"
    steps = config.training.steps
    if shown and (wish == "live" or (wish == "" and console.is_terminal and not console.is_dumb_terminal)):
        display: Display = LiveDisplay(steps, info, console)
    else:
        display = PlainDisplay(steps, info.start_step, lines=shown, console=console)
    head = f"{info.description}; {info.positions_per_step:,} tokens a step; {run_dir}"
    display.message(head.removeprefix("; "))
    return display
