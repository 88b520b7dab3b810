"""A run's metrics.jsonl in one pass: where each task started, where it stands, how fast the run was."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trp_scale.observe.metrics import read_metrics

END_LINES = 10
"""Logged steps at the end of a run over which losses and weights are averaged: one step of a rare task is a handful of
elements and says little."""


@dataclass(kw_only=True)
class TaskHistory:
    """One task over a run.

    Attributes:
        start: loss in the first logged step that had the task; None if it never came.
        end: mean loss over the last END_LINES logged steps, weighted by counts; None if it did not come there.
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
    """What a run's metrics say in all. Times are medians over logged steps, but for training_seconds, the sum over all
    steps; memory is rank 0's. outside_tasks: those whose weights the balancer does not decide."""

    tasks: dict[str, TaskHistory] = field(default_factory=dict)
    outside_tasks: set[str] = field(default_factory=set)
    worst_task: str | None = None
    first_step: int = 0
    last_step: int = 0
    loss_start: float | None = None
    loss_end: float | None = None
    skipped_steps: int = 0
    training_seconds: float = 0.0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    model_flops_utilisation: float | None = None
    peak_memory_bytes: int = 0
    validation_step: int | None = None
    validation: Mapping[str, Any] | None = None


def worst(losses: Mapping[str, float | None], outside: Iterable[str]) -> str | None:
    """The task with the largest loss among those in the maximum, None when there is none."""
    left_out = set(outside)
    inside = {name: loss for name, loss in losses.items() if loss is not None and name not in left_out}
    return max(inside, key=lambda name: inside[name]) if inside else None


def task_history(name: str, start: float | None, lines: Iterable[Mapping[str, Any]]) -> TaskHistory:
    """What the last lines say about one task."""
    entries = [line["tasks"][name] for line in lines if name in line["tasks"]]
    seen = [entry for entry in entries if entry["loss"] is not None and entry["count"] > 0]
    count = sum(entry["count"] for entry in seen)
    end = sum(entry["loss"] * entry["count"] for entry in seen) / count if count else None
    weights = [entry["weight"] for entry in seen if entry["weight"] is not None]
    return TaskHistory(start=start, end=end, weight=statistics.fmean(weights) if weights else None, count=count)


def read_history(run_dir: Path) -> RunHistory:
    """Read a run's metrics. Raises what `read_metrics` raises."""
    history = RunHistory()
    starts: dict[str, float | None] = {}
    recent: deque[dict[str, Any]] = deque(maxlen=END_LINES)
    columns: dict[str, list[float]] = {"step_seconds": [], "tokens_per_second": [], "model_flops_utilisation": []}
    for line in read_metrics(run_dir):
        if line.get("validation") is not None:
            history.validation_step, history.validation = line["step"], line["validation"]
        if "tasks" not in line:
            continue
        history.first_step = history.first_step or line["step"]
        history.training_seconds += (line.get("step_seconds") or 0.0) * (line["step"] - history.last_step)
        history.last_step = line["step"]
        history.skipped_steps += 0 if line["applied"] else 1
        history.peak_memory_bytes = max(history.peak_memory_bytes, line["peak_memory_bytes"])
        history.outside_tasks.update(line.get("outside_tasks", ()))
        for name, values in columns.items():
            if line.get(name) is not None:
                values.append(line[name])
        for name, entry in line["tasks"].items():
            starts[name] = entry["loss"] if starts.get(name) is None else starts[name]
        if history.loss_start is None:
            history.loss_start = line["loss"]
        recent.append(line)
    losses = [line["loss"] for line in recent if line["loss"] is not None]
    history.loss_end = statistics.fmean(losses) if losses else None
    history.tasks = {name: task_history(name, start, recent) for name, start in starts.items()}
    # A task that balancer.min_count kept out in all these steps is not the worst for its few elements' sake.
    unweighted = {name for name, task in history.tasks.items() if task.weight == 0.0}
    left_out = history.outside_tasks | unweighted
    history.worst_task = worst({name: task.end for name, task in history.tasks.items()}, left_out)
    for name, values in columns.items():
        setattr(history, name, statistics.median(values) if values else None)
    return history
