"""metrics.jsonl: one JSON object a logged step, flushed line by line, safe to append to after a kill.

The loop's records of a step are plain Python numbers, already summed over all ranks. Read back in one pass, the file
gives a run's history: where each task started, where it stands, how fast the run was.
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
from trp_scale.config.json_files import json_lines, parse_json
from trp_scale.config.schema import PartOf, Whole, record

FINISHED = "finished"
"""Why a run ended that made all its steps."""

NO_BETTER = "no better "
"""How the reason begins for which a run ends before its last step, with nothing left to do."""


def nothing_left(why: str) -> bool:
    """Whether a run that ended so is over: its steps are made, or patience has ended it."""
    return why == FINISHED or why.startswith(NO_BETTER)


@dataclass(kw_only=True)
class TaskRecord:
    """One task in one step.

    Attributes:
        loss: mean over the task's elements of the global batch; None where it had none.
        weight: weight of that mean in the total loss.
        count: number of its elements in the global batch.
    """

    loss: float | None
    weight: float
    count: int


@dataclass(kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: steps done, this one included: the first is 1, as in a checkpoint's name.
        loss: total loss of the global batch.
        lr: learning rate of the step.
        grad_norm: norm of the gradient before clipping.
        tasks: every task of the objective, absent ones with loss None and count 0.
        step_seconds: time of the whole step, waiting for data included.
        processor_seconds: that rank 0's process used in it, its threads together.
        data_wait_seconds: of step_seconds, what rank 0 spent waiting for the loader, in the loop and in hooks.
        applied: False when the step was skipped because its loss or gradient was not finite.
        hooks: one object per hook under the hook's name; may be empty on steps that `Observer.wants` does not ask for.
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


@dataclass(kw_only=True)
class RunInfo:
    """Constants of a run that its figures need.

    Attributes:
        positions_per_step: sequence positions of one step on all ranks, padding included: rows x length.
        images_per_step: of one step on all ranks; 0 where rows are no images.
        flops_per_step: model FLOPs of one training step on all ranks (3 x forward, no recomputation); 0 = not known.
        device_name: as torch names it, or "cpu".
        outside_tasks: tasks that take no part in the maximum; never marked as the worst.
        start_step: steps done before this process began (a resumed run).
        rows: rows of each source: of an epoch, or of a pass over what is held out.
        workers, workers_asked: loader processes of rank 0, and how many --data.workers is.
        shown: names of each hook's metrics that the display shows.
        description: one line for the head of the display and the report, such as "deepspeed, ZeRO 2, 2 ranks, fp32".
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
        """Images that so many positions are."""
        return positions * self.images_per_step / self.positions_per_step


Name = TypeVar("Name")

LONGEST_LINE = 1 << 24
"""Bytes at the end of the file that are searched for the last newline."""

MOST_HELD = 64 << 20
"""Bytes of lines that wait for storage to take them; beyond, the oldest go."""


def finite(value: Any) -> Any:
    """`value` with every number that is not finite replaced by None: strict JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def drop_torn_line(path: Path) -> None:
    """Cut a last line without a newline, left by a process that was killed while it wrote."""
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
    """Appends to `run_dir`/metrics.jsonl. Lines that storage refuses, as a full disk does, are held and written with
    the next one; the run goes on.

    Raises:
        TypeError: a value that JSON does not know (a tensor, say), with the line's step.
    """

    def __init__(self, run_dir: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.path)
        # No buffer: it would write what was refused a second time.
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
        """Write what is held, if that can be, and say what could not be."""
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
                    self._tell(f"{self.path}: cannot be written ({error.strerror}); its lines are held for later")
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
        """Append a line whole, or nothing of it.

        Raises:
            OSError: storage refuses it.
        """
        if self._torn:
            os.ftruncate(self._file.fileno(), self._size)
            self._torn = False
        rest = memoryview(line)
        try:
            # One call a line, if all of it is taken, so that a reader who follows the file never sees half of one.
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._torn = len(rest) < len(line)
            if self._torn:
                with contextlib.suppress(OSError):  # it is tried again before the next line
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
    """Learned-mask fields of a line. Attributes: lessons: of the masking network so far; overlap_untrained,
    overlap_last: share of the patches that it masks that it would mask untrained, and masked before its last lesson."""

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
    """The lines of a run's metrics.jsonl, oldest first; a torn last line is left out.

    Raises:
        RefusedError: the directory holds no metrics.jsonl, or a whole line is not a JSON object; with its number.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        what = f"{run_dir} is not a run directory, or the run made no step{name_seed_runs(Path(run_dir))}"
        raise RefusedError(f"{path} does not exist: {what}")
    for number, text in json_lines(path):
        if not text.endswith(b"\n"):
            return
        line = parse_json(text, f"{path}: line {number}", looked_through=False)
        record(_Line, line, f"{path}: line {number}", RefusedError)
        yield line


def newest_run(parent: Path) -> Path:
    """Return the run directory in `parent` with the latest write to metrics.jsonl.

    Raises:
        RefusedError: there is none.
    """
    paths = sorted(Path(parent).glob(f"*/{METRICS_FILE}"), key=lambda path: (path.stat().st_mtime, path))
    if not paths:
        raise RefusedError(f"there is no run in {Path(parent).absolute()}; say which one with --run DIR")
    return paths[-1].parent


END_SHARE = 0.1
"""Share of a run's steps, at its end, over which losses and weights are averaged: one step of a rare task is a handful
of elements and says little. Of steps, not of lines: ten lines are half of a short run that logs each tenth step."""


DIVERGED = 10.0
"""Times its start: a mean loss above that at the end is of a run that diverged. A balancer or an adversary may let
losses rise, but not by so much."""


def end_begins(last_step: int) -> int:
    """The first of the steps that are averaged; the last one is always among them."""
    return last_step - max(1, int(last_step * END_SHARE)) + 1


@dataclass(kw_only=True)
class TaskHistory:
    """One task over a run.

    Attributes:
        start: loss in the first logged step that had the task; None if it never came.
        end: mean loss over the logged steps from `end_begins` on, weighted by counts; None if it did not come there.
        weight: mean weight over those of the same steps that had the task; None if none had.
        count: its elements in those steps.
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
    """Summary of a run's metrics. Times are medians over logged steps, but for training_seconds and data_wait_seconds,
    sums over all steps; memory, waiting and use of the cache are rank 0's. outside_tasks: those whose weights the
    balancer does not decide. worst_task: at the end; first_worst_task: of the same tasks, at the start. end_lines:
    logged steps from `end_begins` on; loss_end: their mean. notices: what hooks had to say in the last line, by their
    names. lesson: of learned masks, in the last line. held_out: held-out losses by step."""

    tasks: dict[str, TaskHistory] = field(default_factory=dict)
    outside_tasks: set[str] = field(default_factory=set)
    worst_task: str | None = None
    first_worst_task: str | None = None
    first_step: int = 0
    last_step: int = 0
    loss_start: float | None = None
    loss_end: float | None = None
    end_lines: int = 0
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
        """Cost of a step: processor seconds on a CPU, which other load does not change, and seconds on a GPU; `None` if
        no step was logged."""
        return self.step_seconds if self.processor_seconds is None else self.processor_seconds

    @property
    def diverged(self) -> str:
        """Reason why the end of the run is no result, or "": most steps were skipped and no loss is finite, or the
        unweighted task losses are far above their start. Empty: it is one."""
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
        """Share of the steps' time that was spent waiting for the loader; None before the first step."""
        return self.data_wait_seconds / self.training_seconds if self.training_seconds else None


FEWEST = 30
"""Elements below which a task's figure is noise: it is not put into words, and not the worst if another has as many."""


def worst_task(
    losses: Mapping[Name, float | None], counts: Mapping[Name, int | None], outside: Iterable[Name] = ()
) -> Name | None:
    """Return the task with the largest loss among those with FEWEST elements or more; of all if none has as many; None
    if there is none. The first of equal ones. Every table and figure that names a worst task asks here.

    Args:
        counts: measured elements, or rows; None: not known, and taken for enough.
        outside: tasks that take no part in the maximum.
    """
    left_out = set(outside)
    inside = {name: loss for name, loss in losses.items() if loss is not None and name not in left_out}
    enough = [name for name in inside if (count := counts.get(name)) is None or count >= FEWEST]
    return max(enough or inside, key=lambda name: inside[name], default=None)


def task_history(name: str, start: float | None, lines: Iterable[Mapping[str, Any]]) -> TaskHistory:
    """Return the last losses of one task."""
    entries = [line["tasks"][name] for line in lines if name in line["tasks"]]
    seen = [entry for entry in entries if entry["loss"] is not None and entry["count"] > 0]
    count = sum(entry["count"] for entry in seen)
    end = sum(entry["loss"] * entry["count"] for entry in seen) / count if count else None
    weights = [entry["weight"] for entry in seen if entry["weight"] is not None]
    return TaskHistory(start=start, end=end, weight=statistics.fmean(weights) if weights else None, count=count)


def hook_notices(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the `notice` values of hooks, by the hooks' names."""
    notices = {name: values.get("notice") for name, values in line.items() if isinstance(values, Mapping)}
    return {name: notice for name, notice in notices.items() if isinstance(notice, str) and notice}


MEDIANS = ("step_seconds", "processor_seconds", "tokens_per_second", "images_per_second", "model_flops_utilisation")
"""Fields of a line of which a run's history has the median."""


def read_history(run_dir: Path, also: Callable[[Mapping[str, Any]], None] = lambda line: None) -> RunHistory:
    """Read a run's metrics, each line shown to `also`, too. Raises what `read_metrics` raises."""
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
    history.end_lines = len(recent)
    if last is not None:
        history.notices = hook_notices(last)
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
