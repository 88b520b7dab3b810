"""results.json: what fine-tuned runs reached on their tasks."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trp_scale.config import RefusedError
from trp_scale.config.json_files import read_json
from trp_scale.config.schema import record
from trp_scale.errors import quote, shorten
from trp_scale.storage.files import write_text

RESULTS_FILE = "results.json"
RESULT_FILE = "result.json"
"""The result of one seed, in its own run directory."""

AVERAGE, WORST = "average", "worst"
"""Rows over tasks that are judged together."""

CONSTANT = "constant_"
"""Before a figure's name among the metrics: what the best constant prediction reaches, the same one for all rows."""


@dataclass(kw_only=True)
class SeedResult:
    """One fine-tuned run.

    Attributes:
        task, metric, split: as in TaskResult.
        seed: training.seed.
        metrics: all figures by name.
        detail: per class or per group, as the task has it.
        settings: of a fine-tuned run, as they were asked for, before the data completed them.
        data: digest of what a fine-tuned run has learned from and was measured on; empty = not known.
        rows, judged: as in TaskResult.
    """

    task: str
    metric: str
    split: str
    lower_is_better: bool
    seed: int
    metrics: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    rows: str = ""
    judged: bool = True


@dataclass(kw_only=True)
class TaskResult:
    """One task over seeds.

    Attributes:
        metric: the figure the task is judged by.
        split: dev or test.
        seeds, values: of each run.
        mean: of the values.
        spread: their sample standard deviation; 0 for one seed, NaN where a figure is no finite number.
        metrics: every figure's values, seed by seed.
        rows: names the measured rows, where figures of others must not be compared with these (losses of
            pre-training); empty = the split says enough.
        judged: False: not among the tasks of which the worst is sought.
    """

    task: str
    metric: str
    split: str
    lower_is_better: bool
    seeds: list[int]
    values: list[float]
    mean: float
    spread: float
    metrics: dict[str, list[float]]
    detail: list[dict[str, Any]] = field(default_factory=list)
    rows: str = ""
    judged: bool = True

    @property
    def sign(self) -> float:
        """1 where more is better, else -1."""
        return -1.0 if self.lower_is_better else 1.0

    @cached_property
    def count(self) -> int | None:
        """Elements, images or rows that were measured, of seeds that differ the fewest; None: not known."""
        counts = [count for detail in self.detail if (count := _count_measured(detail)) is not None]
        return min(counts, default=None)


def _count_measured(detail: Mapping[str, Any]) -> int | None:
    for name in ("elements", "images", "rows"):
        if type(detail.get(name)) is int:
            return int(detail[name])
    parts = [_count_measured(part) for part in detail.values() if isinstance(part, Mapping)]
    return sum(count for count in parts if count is not None) or None


@dataclass(kw_only=True)
class Results:
    """Results of one `trp-scale finetune` or `evaluate`.

    Attributes:
        recipe: its name or path.
        encoder: as --from named it.
        tasks: in the order they were asked for.
    """

    recipe: str
    encoder: str
    tasks: list[TaskResult]


def constant_figure(task: TaskResult) -> float | None:
    """Return the task metric of the best constant prediction; `None` if unknown."""
    constant = task.metrics.get(CONSTANT + task.metric)
    return None if constant is None else statistics.fmean(constant)


def judged_together(task: TaskResult) -> tuple[str, str]:
    """Kind of figure: which of two tasks is worse can be said only if it is the same. Figures of at most 1 of which
    more is better (accuracy, F1, correlations, mIoU, AP) are one kind, as TRP's Table 1 has it; each error is a kind of
    its own; so are dev and test."""
    return (task.metric if task.lower_is_better else "higher is better", task.split)


def join(results: list[SeedResult]) -> TaskResult:
    """The runs of one task as one result."""
    first = results[0]
    values = [result.metrics[first.metric] for result in results]
    spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0
    return TaskResult(
        task=first.task,
        metric=first.metric,
        split=first.split,
        lower_is_better=first.lower_is_better,
        seeds=[result.seed for result in results],
        values=values,
        mean=statistics.fmean(values),
        spread=spread if all(map(math.isfinite, values)) else math.nan,
        metrics={
            name: [result.metrics[name] for result in results]
            for name in first.metrics
            if all(name in result.metrics for result in results)
        },
        detail=[result.detail for result in results],
        rows=first.rows,
        judged=first.judged,
    )


def write_results(path: Path, content: object) -> None:
    """Write a dataclass as JSON by `atomic_write`."""
    write_text(path, json.dumps(asdict(content), indent=2) + "\n")  # type: ignore[call-overload]


def read_seed(path: Path) -> SeedResult | None:
    """The result of one run, or None where there is none yet.

    Raises:
        RefusedError: it is not one of ours.
    """
    if not path.is_file():
        return None
    advice = "it is not written by this version of trp-scale finetune; give another --run_dir"
    result = record(SeedResult, _read(path), str(path), RefusedError, advice)
    if result.metric not in result.metrics:
        raise RefusedError(f"{path}: metrics {quote(result.metrics)} found, {quote(result.metric)} among them expected")
    return result


def read_results(run_dir: Path) -> Results:
    """results.json of a directory.

    Raises:
        RefusedError: there is none, it is not one of ours, or a figure is not a finite number.
    """
    path = run_dir / RESULTS_FILE
    if not path.is_file() and (run_dir / RESULT_FILE).is_file():
        raise RefusedError(f"{path} is missing; {RESULT_FILE} is that of one seed: give the directory above its task's")
    advice = "it is not written by trp-scale finetune, evaluate or probe"
    results = record(Results, _read(path), str(path), RefusedError, advice)
    for task in results.tasks:
        message = f"{path}: {shorten(task.task)} has the figures {quote(task.values)}"
        if not len(set(task.seeds)) == len(task.seeds) == len(task.values) > 0:
            raise RefusedError(f"{message} of seeds {quote(task.seeds)}; one of each is expected; {advice}")
        if not all(map(math.isfinite, task.values)):
            raise RefusedError(
                f"{message}; allowed: finite numbers. Run the seed again with other settings, or leave the task out"
            )
    return results


def _read(path: Path) -> Any:
    if path.parent.exists() and not path.parent.is_dir():
        raise RefusedError(f"{path.parent} is a file; allowed: the directory that holds {path.name}")
    return read_json(
        path,
        missing="missing; allowed: a directory that trp-scale finetune, evaluate or probe has finished; runs of "
        "pre-training are put side by side by trp-scale compare --html FILE",
    )
