"""metrics.jsonl: one JSON object for each logged step, flushed line by line; a killed run can be appended to.

Step records are plain Python numbers, summed over all ranks. Reading the file once gives a run's history: start and end
of each task, speed, memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trp_scale.checkpoint.run_directory import METRICS_FILE, name_seed_runs
from trp_scale.config import RefusedError
from trp_scale.config.files import json_lines, parse_json
from trp_scale.config.schema import PartOf, Whole, record

FINISHED = "finished"
"""End reason of a run that made all its steps."""

NO_BETTER = "no better "
"""Prefix of the end reason of a run that patience ended early."""


def nothing_left(why: str) -> bool:
    """Whether a run with this end reason is complete: all steps made, or ended by patience."""
    return why == FINISHED or why.startswith(NO_BETTER)


@dataclass(kw_only=True)
class TaskRecord:
    """Record of a task in a step.

    Attributes:
        loss: mean over the task's elements of the global batch; None without elements.
        weight: weight of this mean in the total loss.
        count: elements in the global batch.
    """

    loss: float | None
    weight: float
    count: int


@dataclass(kw_only=True)
class StepRecord:
    """Record of an optimizer step.

    Attributes:
        step: number of the step, from 1, as in a checkpoint's name.
        loss: total loss of the global batch.
        lr: learning rate of the step.
        grad_norm: norm of the gradient before clipping.
        tasks: every task of the objective; absent tasks have loss None and count 0.
        step_seconds: duration of the step, including the wait for data.
        processor_seconds: CPU time of rank 0's process, all threads.
        data_wait_seconds: part of step_seconds that rank 0 waited for the loader, in the loop and in hooks.
        applied: False if the step was skipped: loss or gradient not finite, or a spike.
        hooks: metrics of each hook by its name; may be empty unless `Observer.wants` the step.
        replays: micro-batches that ran as CUDA graphs on rank 0, extra passes included; None without capture.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tasks: Mapping[str, TaskRecord]
    step_seconds: float
    processor_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    applied: bool = True
    hooks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replays: int | None = None


@dataclass(kw_only=True)
class RunInfo:
    """Constants of a run for its figures.

    Attributes:
        positions_per_step: sequence positions of a step on all ranks, including padding: rows x length.
        images_per_step: images of a step on all ranks; 0 if rows are not images.
        flops_per_step: model FLOPs of a step on all ranks (3 x forward, no recomputation); 0: unknown.
        device_name: torch's name, or "cpu".
        outside_tasks: tasks outside the maximum; never marked as the worst.
        start_step: steps done before this process (a resumed run).
        rows: rows of each source, per epoch or per pass over the held-out rows.
        workers, workers_asked: loader processes of rank 0, and --data.workers.
        shown: names of each hook's metrics in the display.
        description: head of the display and the report, such as "deepspeed, ZeRO 2, 2 ranks, fp32".
    """

    positions_per_step: int
    images_per_step: int = 0
    flops_per_step: float = 0.0
    devices: int = 1
    device_name: str = "cpu"
    outside_tasks: tuple[str, ...] = ()
    start_step: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    workers: int = 0
    workers_asked: int = 0
    shown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""

    def image_count(self, positions: float) -> float:
        """Convert positions to images."""
        return positions * self.images_per_step / self.positions_per_step


Name = TypeVar("Name")

LONGEST_LINE = 1 << 24
"""Bytes at the end of the file in which the last newline is searched."""

MOST_HELD = 64 << 20
"""Bytes of unwritten lines kept in memory; beyond it the oldest are dropped."""


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None: strict JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def drop_torn_line(path: Path) -> None:
    """Remove a last line without a newline, left by a process that was killed during a write."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LONGEST_LINE)
        file.seek(start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)


class MetricsWriter:
    """Writer of `run_dir`/metrics.jsonl. If storage fails (a full disk), lines are kept and written with the next one;
    the run continues.

    Raises:
        TypeError: a value is no JSON value (a tensor, for example), with the step.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.path)
        # Unbuffered: a buffer would write a failed line a second time.
        self._file: BinaryIO = self.path.open("ab", buffering=0)  # type: ignore[assignment]
        self._tell = tell
        self._size = os.fstat(self._file.fileno()).st_size
        self._held: deque[bytes] = deque()
        self._lost = 0
        self._refused = self._torn = False

    def write(self, line: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(finite(line), allow_nan=False)
        except TypeError as error:
            raise TypeError(f"{self.path}: step {line.get('step')}: {error}; metrics must be plain numbers") from error
        self._held.append(text.encode() + b"\n")
        self._write_held()

    def close(self) -> None:
        """Write the kept lines if possible, and log how many are lost."""
        self._write_held()
        if lost := len(self._held) + self._lost:
            self._tell(f"{self.path}: {lost} lines could not be written and are lost")
        self._file.close()

    def _write_held(self) -> None:
        while self._held:
            try:
                self._append(self._held[0])
            except OSError as error:
                if not self._refused:
                    self._tell(f"{self.path}: cannot be written ({error.strerror}); its lines are kept for later")
                self._refused = True
                while sum(map(len, self._held)) > MOST_HELD:
                    self._held.popleft()
                    self._lost += 1
                return
            self._held.popleft()
        if self._refused:
            self._refused = False
            self._tell(f"{self.path}: can be written again")

    def _append(self, line: bytes) -> None:
        """Append a line completely or not at all. Raises OSError if storage fails."""
        if self._torn:
            os.ftruncate(self._file.fileno(), self._size)
            self._torn = False
        rest = memoryview(line)
        try:
            # Normally one call for each line, so that readers see complete lines only.
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._torn = len(rest) < len(line)
            if self._torn:
                with contextlib.suppress(OSError):  # retried before the next line
                    os.ftruncate(self._file.fileno(), self._size)
                    self._torn = False
            raise
        self._size += len(line)


@dataclass(frozen=True, kw_only=True)
class _Task(PartOf):
    loss: float | None
    weight: float | None
    count: Whole


@dataclass(frozen=True, kw_only=True)
class _Measured(PartOf):
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Validation(PartOf):
    loss: float | None = None
    tasks: dict[str, _Measured] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Cache(PartOf):
    found: Whole
    fetched: Whole
    fetched_bytes: Whole
    ahead: Whole
    ahead_bytes: Whole


@dataclass(frozen=True, kw_only=True)
class LastLesson(PartOf):
    """Learned-mask fields of a line.

    Attributes:
        lessons: updates of the masking network so far.
        overlap_untrained, overlap_last: share of the masked patches that the untrained network masks too, and that were
            masked before the last update."""

    lessons: Whole = 0
    overlap_untrained: float | None = None
    overlap_last: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Line(PartOf):
    step: Whole
    tasks: dict[str, _Task] = field(default_factory=dict)
    validation: _Validation | None = None
    loss: float | None = None
    applied: bool = True
    outside_tasks: list[str] = field(default_factory=list)
    peak_memory_bytes: Whole = 0
    step_seconds: float | None = None
    processor_seconds: float | None = None
    data_wait_seconds: float | None = None
    tokens_per_second: float | None = None
    images_per_second: float | None = None
    model_flops_utilisation: float | None = None
    cache: _Cache | None = None
    multilevel: LastLesson | None = None


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, oldest first, without an incomplete last line.

    Raises:
        RefusedError: no metrics.jsonl exists, or a complete line is not a JSON object; with its number.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        what = f"{run_dir} is not a run directory, or the run made no step{name_seed_runs(Path(run_dir))}"
        raise RefusedError(f"{path} does not exist: {what}")
    for number, text in json_lines(path):
        if not text.endswith(b"\n"):
            return
        line = parse_json(text, f"{path}: line {number}", check_limits=False)
        record(_Line, line, f"{path}: line {number}", RefusedError)
        yield line


def newest_run(parent: Path) -> Path:
    """Return the run directory in `parent` with the latest write to metrics.jsonl.

    Raises:
        RefusedError: none exists.
    """
    paths = sorted(Path(parent).glob(f"*/{METRICS_FILE}"), key=lambda path: (path.stat().st_mtime, path))
    if not paths:
        raise RefusedError(f"no run in {Path(parent).absolute()}; name one with --run DIR")
    return paths[-1].parent


END_SHARE = 0.1
"""Share of a run's last steps over which losses and weights are averaged: a single step has few elements of a rare
task. It counts steps, not lines: ten lines are half of a short run that logs every tenth step."""


DIVERGED = 10.0
"""A run has diverged if its mean loss at the end is above this factor times the start. A balancer or an adversary may
raise losses, but by less."""


def end_begins(last_step: int) -> int:
    """Return the first step of that average; it always includes the last step."""
    return last_step - max(1, int(last_step * END_SHARE)) + 1


@dataclass(kw_only=True)
class TaskHistory:
    """History of a task over a run.

    Attributes:
        start: loss in the first logged step with the task; None if none has it.
        end: mean loss over the logged steps from `end_begins` on, weighted by counts; None without elements there.
        weight: mean weight over those of these steps that have the task; None if none has it.
        count: elements in these steps.
    """

    start: float | None
    end: float | None
    weight: float | None
    count: int

    @property
    def change(self) -> float | None:
        return None if self.start is None or self.end is None else self.end - self.start


@dataclass(kw_only=True)
class RunHistory:
    """Summary of a run's metrics. Memory, waits and cache use are of rank 0.

    Attributes:
        training_seconds, data_wait_seconds: sums over all steps; other times are medians over logged steps.
        outside_tasks: tasks without a weight from the balancer.
        worst_task, first_worst_task: at the end; at the start, of the same tasks.
        loss_end: mean loss of the logged steps from `end_begins` on.
        notices, lesson: messages of hooks by hook, and fields of learned masks, in the last line.
        held_out: held-out losses by step."""

    tasks: dict[str, TaskHistory] = field(default_factory=dict)
    outside_tasks: set[str] = field(default_factory=set)
    worst_task: str | None = None
    first_worst_task: str | None = None
    first_step: int = 0
    last_step: int = 0
    loss_start: float | None = None
    loss_end: float | None = None
    skipped_steps: int = 0
    training_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    step_seconds: float | None = None
    processor_seconds: float | None = None
    tokens_per_second: float | None = None
    images_per_second: float | None = None
    model_flops_utilisation: float | None = None
    peak_memory_bytes: int = 0
    cache: dict[str, int] = field(default_factory=dict)
    validation_step: int | None = None
    validation: Mapping[str, Any] | None = None
    held_out: dict[int, float] = field(default_factory=dict)
    notices: dict[str, str] = field(default_factory=dict)
    lesson: LastLesson | None = None

    @property
    def seconds_of_step(self) -> float | None:
        """Cost of a step: CPU time on a CPU, which does not depend on other load, and seconds on a GPU; `None` if no
        step was logged."""
        return self.step_seconds if self.processor_seconds is None else self.processor_seconds

    @property
    def diverged(self) -> str:
        """Why the run diverged, or "": most steps were skipped and no loss is finite, or the unweighted task losses are
        far above their start."""
        since = f"from step {end_begins(self.last_step)} on"
        if self.loss_end is None and 2 * self.skipped_steps > self.last_step:
            return f"{self.skipped_steps} of {self.last_step} steps were skipped, and no loss is finite {since}"
        both = [
            (task.start, task.end) for task in self.tasks.values() if task.start is not None and task.end is not None
        ]
        start, end = (statistics.fmean(losses) for losses in zip(*both, strict=True)) if both else (0.0, 0.0)
        return f"the tasks' mean loss was {start:.4g}, and is {end:.4g} {since}" if end > DIVERGED * start > 0 else ""

    @property
    def data_wait_share(self) -> float | None:
        """Share of the steps' time spent waiting for the loader; `None` before the first step."""
        return self.data_wait_seconds / self.training_seconds if self.training_seconds else None


FEWEST = 30
"""Minimum number of elements of a task. Below it the task is not described, and not the worst if another task has
enough elements."""


def worst_task(
    losses: Mapping[Name, float | None], counts: Mapping[Name, int | None], outside: Iterable[Name] = ()
) -> Name | None:
    """Return the task with the largest loss, the first of equal ones, among the tasks with at least FEWEST elements, or
    among all if none has enough; `None` without losses. All tables and figures use this function.

    Args:
        counts: measured elements or rows; None: unknown, counts as enough.
        outside: tasks outside the maximum.
    """
    left_out = set(outside)
    inside = {name: loss for name, loss in losses.items() if loss is not None and name not in left_out}
    enough = [name for name in inside if (count := counts.get(name)) is None or count >= FEWEST]
    return max(enough or inside, key=lambda name: inside[name], default=None)


def task_history(name: str, start: float | None, lines: Iterable[Mapping[str, Any]]) -> TaskHistory:
    """Return the history of a task from its start and the last lines."""
    entries = [line["tasks"][name] for line in lines if name in line["tasks"]]
    seen = [entry for entry in entries if entry["loss"] is not None and entry["count"] > 0]
    count = sum(entry["count"] for entry in seen)
    end = sum(entry["loss"] * entry["count"] for entry in seen) / count if count else None
    weights = [entry["weight"] for entry in seen if entry["weight"] is not None]
    return TaskHistory(start=start, end=end, weight=statistics.fmean(weights) if weights else None, count=count)


MEDIANS = ("step_seconds", "processor_seconds", "tokens_per_second", "images_per_second", "model_flops_utilisation")
"""Fields of a line that a run's history has as medians."""


def read_history(run_dir: Path, also: Callable[[Mapping[str, Any]], None] = lambda line: None) -> RunHistory:
    """Read a run's metrics; `also` is called with each line. Raises what `read_metrics` raises."""
    history = RunHistory()
    starts: dict[str, float | None] = {}
    recent: deque[dict[str, Any]] = deque()
    last: dict[str, Any] | None = None
    columns: dict[str, list[float]] = {name: [] for name in MEDIANS}
    for line in read_metrics(run_dir):
        also(line)
        if line.get("validation") is not None:
            history.validation_step, history.validation = line["step"], line["validation"]
            history.held_out = {step: loss for step, loss in history.held_out.items() if step < line["step"]}
            if (loss := line["validation"].get("loss")) is not None:
                history.held_out[line["step"]] = loss
        if "tasks" not in line:
            continue
        history.first_step = history.first_step or line["step"]
        steps = line["step"] - history.last_step
        history.training_seconds += (line.get("step_seconds") or 0.0) * steps
        for name, count in (line.get("cache") or {}).items():
            history.cache[name] = history.cache.get(name, 0) + count
        history.data_wait_seconds += (line.get("data_wait_seconds") or 0.0) * steps
        history.last_step = line["step"]
        history.skipped_steps += 0 if line.get("applied", True) else 1
        history.peak_memory_bytes = max(history.peak_memory_bytes, line.get("peak_memory_bytes", 0))
        history.outside_tasks.update(line.get("outside_tasks", ()))
        for name, values in columns.items():
            if line.get(name) is not None:
                values.append(line[name])
        for name, entry in line["tasks"].items():
            starts[name] = entry["loss"] if starts.get(name) is None else starts[name]
        if history.loss_start is None:
            history.loss_start = line.get("loss")
        last = line
        recent.append({name: line.get(name) for name in ("step", "loss", "tasks")})
        while recent[0]["step"] < end_begins(history.last_step):
            recent.popleft()
    if last is not None:
        notices = {name: values.get("notice") for name, values in last.items() if isinstance(values, Mapping)}
        history.notices = {name: notice for name, notice in notices.items() if isinstance(notice, str) and notice}
        history.lesson = record(_Line, last, str(Path(run_dir) / METRICS_FILE), RefusedError).multilevel
    losses = [line["loss"] for line in recent if line.get("loss") is not None]
    history.loss_end = statistics.fmean(losses) if losses else None
    history.tasks = {name: task_history(name, start, recent) for name, start in starts.items()}
    counts, outside = {name: task.count for name, task in history.tasks.items()}, history.outside_tasks
    history.worst_task = worst_task({name: task.end for name, task in history.tasks.items()}, counts, outside)
    history.first_worst_task = worst_task(starts, counts, outside)
    for name, values in columns.items():
        setattr(history, name, statistics.median(values) if values else None)
    return history
