"""The rows of a study's table: each task that a judge measures, and the average and the worst of those that are judged
together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trp_scale.reporting.results import TaskResult, judged_together
from trp_scale.studies.study import AVERAGE, WORST
from trp_scale.training.metrics import worst_task


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of one run.

    Attributes:
        metric: its name.
        split: of the measured rows.
        lower_is_better: of the metric.
        values: by seed of the judging; of average and worst, one: over the tasks' means.
        judged: False: a second measurement of a task, beside its own row; in no average and never the worst.
        count: measured rows; None: not known.
    """

    metric: str
    split: str
    lower_is_better: bool
    values: Sequence[float]
    judged: bool = True
    count: int | None = None

    @property
    def sign(self) -> float:
        """1 where more is better, else -1."""
        return -1.0 if self.lower_is_better else 1.0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def rows_of(tasks: Sequence[TaskResult]) -> dict[str, Row]:
    """By task, in order; then average and worst, if all that are judged are so together: of accuracies, F1 and
    correlations the lowest is worst, of errors of one metric the highest."""
    rows = {
        task.task: Row(
            metric=task.metric,
            split=task.split,
            lower_is_better=task.lower_is_better,
            values=list(task.values),
            judged=task.judged,
            count=task.count,
        )
        for task in tasks
    }
    judged = [task for task in tasks if task.judged]
    if len(set(map(judged_together, judged))) == 1:
        rows |= summaries({task.task: rows[task.task] for task in judged})
    return rows


def summaries(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Average and worst of rows that are judged together."""
    first = next(iter(rows.values()))
    counts = {name: row.count for name, row in rows.items()}
    worst = worst_task({name: -row.sign * row.mean for name, row in rows.items()}, counts)
    assert worst is not None, "there are rows, and each has a mean"
    metric = first.metric if len({row.metric for row in rows.values()}) == 1 else "of the tasks' own"
    return {
        name: Row(metric=metric, split=first.split, lower_is_better=first.lower_is_better, values=[value])
        for name, value in (
            (AVERAGE, statistics.fmean(row.mean for row in rows.values())),
            (WORST, rows[worst].mean),
        )
    }
