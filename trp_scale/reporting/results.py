"""results.json: results of runs on their tasks."""

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
from trp_scale.config.files import read_json
from trp_scale.config.schema import record
from trp_scale.errors import quote, shorten
from trp_scale.storage.files import write_text

RESULTS_FILE = "results.json"
RESULT_FILE = "result.json"
"""Result of one seed, in its run directory."""

AVERAGE, WORST = "average", "worst"
"""Rows over comparable tasks."""

CONSTANT = "constant_"
"""Prefix of metrics of the best constant prediction, which is the same for all rows."""

SPEED = "images_per_second"
"""Name in `detail` of the speed of inference: it is measured with the task, but is no figure of it."""


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """Result of one run on one task; fields as in TaskResult, and:

    Attributes:
        seed: training.seed.
        metrics: all figures by name.
        detail: per class or group.
        settings: of a fine-tuned run, before the data completed them.
        data: digest of the data of a fine-tuned run; empty = unknown.
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


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Results of one task over seeds.

    Attributes:
        metric: main figure.
        split: dev or test.
        seeds, values: by run.
        spread: sample standard deviation; 0 for one seed, NaN with non-finite values.
        metrics: values of every figure, by seed.
        rows: identifies the measured rows if only equal rows are comparable (pre-training losses); empty = `split`
            suffices.
        judged: whether the task counts in average and worst.
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
        """1 if more is better, else -1."""
        return -1.0 if self.lower_is_better else 1.0

    @cached_property
    def count(self) -> int | None:
        """Smallest number of measured elements, images or rows over seeds; `None` if unknown."""
        counts = [count for detail in self.detail if (count := _count_measured(detail)) is not None]
        return min(counts, default=None)


def _count_measured(detail: Mapping[str, Any]) -> int | None:
    for name in ("elements", "images", "rows"):
        if type(detail.get(name)) is int:
            return int(detail[name])
    parts = [_count_measured(part) for part in detail.values() if isinstance(part, Mapping)]
    return sum(count for count in parts if count is not None) or None


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of one `trp-scale finetune`, `evaluate` or `probe`.

    Attributes:
        recipe: name or path.
        encoder: value of --from.
        tasks: in requested order.
    """

    recipe: str
    encoder: str
    tasks: list[TaskResult]


def judged_together(task: TaskResult) -> tuple[str, str]:
    """Return the group of comparable tasks. Figures of at most 1 of which more is better (accuracy, F1, correlations,
    mIoU, AP) are one group (TRP Table 1); each error metric is a separate group. Splits are separate too."""
    return (task.metric if task.lower_is_better else "higher is better", task.split)


def join(results: list[SeedResult]) -> TaskResult:
    """Combine the results of one task over seeds."""
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
    write_text(path, json.dumps(asdict(content), indent=2) + "\n")  # type: ignore[call-overload]


def read_seed(path: Path) -> SeedResult | None:
    """Read the result of one run; `None` if it does not exist. Raises RefusedError for an invalid file."""
    if not path.is_file():
        return None
    advice = "it is not written by this version of trp-scale finetune; give another --run_dir"
    result = record(SeedResult, _read(path), str(path), RefusedError, advice)
    if result.metric not in result.metrics:
        raise RefusedError(f"{path}: metrics {quote(result.metrics)} found, {quote(result.metric)} among them expected")
    return result


def read_results(run_dir: Path) -> Results:
    """Read results.json of a directory. Raises RefusedError if it is missing, invalid, or has non-finite figures."""
    path = run_dir / RESULTS_FILE
    advice = "it is not written by trp-scale finetune, evaluate or probe"
    results = record(Results, _read(path), str(path), RefusedError, advice)
    for task in results.tasks:
        message = f"{path}: {shorten(task.task)} has the figures {quote(task.values)}"
        if not len(set(task.seeds)) == len(task.seeds) == len(task.values) > 0:
            raise RefusedError(f"{message} for seeds {quote(task.seeds)}; expected one figure per seed; {advice}")
        if not all(map(math.isfinite, task.values)):
            raise RefusedError(
                f"{message}; allowed: finite numbers. Run the seed again with other settings, or omit the task"
            )
    return results


def _read(path: Path) -> Any:
    if path.parent.exists() and not path.parent.is_dir():
        raise RefusedError(f"{path.parent} is a file; expected: the directory that contains {path.name}")
    return read_json(
        path,
        missing="missing; expected: a directory of trp-scale finetune, evaluate or probe; compare pre-training runs "
        "with trp-scale compare --html FILE",
    )
