"""Runs side by side: which figures may stand in one row, which task is each run's worst, what differs, and whether by
more than the runs' seeds do.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from trp_scale.config import RefusedError
from trp_scale.reporting.results import Results, TaskResult, constant_of, judged_together, read_results
from trp_scale.training.metrics import worst_task

LEAST_SEEDS = 2
"""Fewest seeds of a paired test."""

ROUNDING = 1e-12
"""Differences that vary by less than this share of the largest figure are equal."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A two-sided test of the differences, seed by seed.

    Attributes:
        seeds: n, that both runs have.
        p: not corrected.
        test: "t" the paired t-test; "sign" the sign test; "equal" nothing to test.
    """

    seeds: int
    p: float
    test: str


def can_test() -> bool:
    """Whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Paired t-test; where it is undefined, because all differences are the same, p is 1 if they are 0, and otherwise
    that of the exact sign test, 2^(1-n).

    Args:
        first, second: figures of the same seeds, two or more, all finite.
    """
    differences = [two - one for one, two in zip(first, second, strict=True)]
    count = len(differences)
    if count < LEAST_SEEDS:
        raise ValueError(f"{count} seeds that both runs have, at least {LEAST_SEEDS} allowed")
    size = ROUNDING * max(abs(value) for value in (*first, *second))
    if max(abs(difference) for difference in differences) <= size:
        return PairedTest(seeds=count, p=1.0, test="equal")
    if max(differences) - min(differences) <= size:
        return PairedTest(seeds=count, p=2.0 ** (1 - count), test="sign")
    from scipy.special import stdtr  # scipy.stats takes a millisecond for each test

    t = statistics.fmean(differences) / (statistics.stdev(differences) / math.sqrt(count))
    return PairedTest(seeds=count, p=2.0 * float(stdtr(count - 1, -abs(t))), test="t")


def holm(values: Sequence[float]) -> list[float]:
    """Each p value corrected for there being several (Holm 1979), in the order given: the k-th smallest of m, from 0,
    times m - k, no smaller than the one before it, 1 at most."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        largest = max(largest, min(1.0, values[place] * (len(values) - rank)))
        corrected[place] = largest
    return corrected


SIGNIFICANT = 0.05
"""Largest corrected p value that is marked."""


class RowKey(NamedTuple):
    """Figures of one row are of the same task, by the same metric, on the same rows."""

    task: str
    metric: str
    split: str
    lower_is_better: bool
    rows: str = ""

    def __str__(self) -> str:
        return f"{self.metric} on {self.split}{f': {self.rows}' if self.rows else ''}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A run's mean less the baseline's.

    Attributes:
        value: positive is better only where the metric is not an error.
        test: None with fewer than two common seeds, or a figure that is no finite number.
        corrected: Holm's p value over all tests of the comparison; None without a test.
    """

    value: float
    test: PairedTest | None = None
    corrected: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the corrected p value is below SIGNIFICANT."""
        return self.corrected is not None and self.corrected < SIGNIFICANT


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Average or worst over the tasks of one kind.

    Attributes:
        name: average or worst.
        split: of all of them.
        values: by run; None for a run that has not all of the tasks.
    """

    name: str
    split: str
    values: list[float | None]


@dataclass(kw_only=True)
class Comparison:
    """Tasks x runs; the first run is the baseline.

    Attributes:
        runs: their names, all different.
        sources: encoder and recipe of each run.
        rows: by key, each run's figure; None where it has none.
        worst: (row, run) of each run's worst task.
        summaries: average and worst of each run.
        differences: by row, to the baseline, for each run after it; None where one of the two has no figure.
        notes: what a reader must know.
    """

    runs: list[str]
    sources: list[tuple[str, str]]
    rows: dict[RowKey, list[TaskResult | None]]
    worst: set[tuple[RowKey, int]] = field(default_factory=set)
    summaries: list[Summary] = field(default_factory=list)
    differences: dict[RowKey, list[Difference | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def constant(self, key: RowKey) -> float | None:
        """Return the metric of the best constant prediction, of the first run that stores it, or `None`."""
        found = (constant_of(task) for task in self.rows[key] if task is not None)
        return next((value for value in found if value is not None), None)

    def count(self, key: RowKey) -> int | None:
        """Return what was measured of a row (`TaskResult.count`), of runs that differ the least; None: not known."""
        return min((task.count for task in self.rows[key] if task is not None and task.count is not None), default=None)

    @property
    def beside(self) -> list[str]:
        """Names of the tasks that no run has judged."""
        return [key.task for key, row in self.rows.items() if not any(task is not None and task.judged for task in row)]

    @property
    def tests(self) -> int:
        """p values in the comparison."""
        return sum(one is not None and one.test is not None for row in self.differences.values() for one in row)


def compare_results(named: Mapping[str, Results]) -> Comparison:
    """Put results side by side.

    Figures of one task by another metric, or on another split, get rows of their own and are named in a note: they are
    never compared. A run's worst task is the one with the lowest mean of those that are judged together
    (`judged_together`), if there are two or more. What is not `judged` is in the rows alone.

    Raises:
        RefusedError: a run has one figure twice.
    """
    rows = _rows(named)
    comparison = Comparison(
        runs=list(named),
        sources=[(results.encoder or "scratch", results.recipe) for results in named.values()],
        rows=rows,
    )
    for keys in _kinds(rows):
        for run in range(len(named)):
            found = {key: task for key in keys if (task := rows[key][run]) is not None and task.judged}
            if len(found) > 1:
                comparison.worst.add((worst_of(found), run))
        if len(keys) > 1 and not keys[0].lower_is_better:
            comparison.summaries += _summaries(keys, rows)
    comparison.differences = _differences(rows)
    comparison.notes = [*_notes_on_rows(comparison), *_notes_on_tests(comparison)]
    return comparison


def worst_of(tasks: Mapping[RowKey, TaskResult]) -> RowKey:
    """The task that is worst, of those that are judged together (training/metrics.py: worst_task)."""
    losses = {key: task.mean if key.lower_is_better else -task.mean for key, task in tasks.items()}
    worst = worst_task(losses, {key: task.count for key, task in tasks.items()})
    assert worst is not None, "there are tasks, and each has a mean"
    return worst


def _rows(named: Mapping[str, Results]) -> dict[RowKey, list[TaskResult | None]]:
    """Group results by row, in the order in which runs first have them; rows of one task are adjacent."""
    rows: dict[RowKey, list[TaskResult | None]] = {}
    for number, (name, results) in enumerate(named.items()):
        for task in results.tasks:
            key = RowKey(task.task, task.metric, task.split, task.lower_is_better, task.rows)
            row = rows.setdefault(key, [None] * len(named))
            if row[number] is not None:
                raise RefusedError(f"{name}: {key.task}, {key.metric} on {key.split} is there twice; allowed: once")
            row[number] = task
    order = list(dict.fromkeys(key.task for key in rows))
    return dict(sorted(rows.items(), key=lambda item: order.index(item[0].task)))


def _kinds(rows: Mapping[RowKey, Sequence[TaskResult | None]]) -> list[list[RowKey]]:
    kinds: dict[tuple[str, str], list[RowKey]] = {}
    for key, row in rows.items():
        judged = next((task for task in row if task is not None and task.judged), None)
        if judged is not None:
            kinds.setdefault(judged_together(judged), []).append(key)
    return list(kinds.values())


def _summaries(keys: Sequence[RowKey], rows: Mapping[RowKey, Sequence[TaskResult | None]]) -> list[Summary]:
    columns = zip(*(rows[key] for key in keys), strict=True)
    whole = [{key: task for key, task in zip(keys, column, strict=True) if task is not None} for column in columns]
    kinds: list[tuple[str, Callable[[Mapping[RowKey, TaskResult]], float]]] = [
        ("average", lambda tasks: statistics.fmean(task.mean for task in tasks.values())),
        ("worst", lambda tasks: tasks[worst_of(tasks)].mean),
    ]
    return [
        Summary(
            name=name, split=keys[0].split, values=[take(tasks) if len(tasks) == len(keys) else None for tasks in whole]
        )
        for name, take in kinds
    ]


def _differences(rows: Mapping[RowKey, Sequence[TaskResult | None]]) -> dict[RowKey, list[Difference | None]]:
    found = {key: [_difference(row[0], other) for other in row[1:]] for key, row in rows.items()}
    tested = [(key, place) for key, row in found.items() for place, one in enumerate(row) if one and one.test]
    tests = [found[key][place] for key, place in tested]
    corrected = holm([one.test.p for one in tests if one is not None and one.test is not None])
    for (key, place), value in zip(tested, corrected, strict=True):
        one = found[key][place]
        assert one is not None
        found[key][place] = replace(one, corrected=value)
    return found


def _difference(baseline: TaskResult | None, other: TaskResult | None) -> Difference | None:
    if baseline is None or other is None:
        return None
    before, after = (dict(zip(task.seeds, task.values, strict=True)) for task in (baseline, other))
    common = sorted(before.keys() & after.keys())
    first, second = ([figures[seed] for seed in common] for figures in (before, after))
    test = None
    if len(common) >= LEAST_SEEDS and can_test() and all(map(math.isfinite, (*first, *second))):
        test = paired_test(first, second)
    return Difference(value=other.mean - baseline.mean, test=test)


def _notes_on_rows(comparison: Comparison) -> list[str]:
    """Tasks that cannot be compared, and runs without some tasks."""
    notes = []
    for task in dict.fromkeys(key.task for key in comparison.rows):
        keys = [key for key in comparison.rows if key.task == task]
        ways = [
            f"{key} ({', '.join(_having(comparison, key))})"
            for key in keys
            if len(_having(comparison, key)) < len(comparison.runs)
        ]
        if len(keys) > 1 and ways:
            notes.append(f"{task} is not compared between these rows: {'; '.join(ways)}")
    for number, run in enumerate(comparison.runs):
        missing = [key.task for key, row in comparison.rows.items() if row[number] is None]
        if missing and any(run_number == number for _, run_number in comparison.worst):
            notes.append(f"the worst task of {run} is that of its own tasks; it lacks {', '.join(missing)}")
    return notes


def _having(comparison: Comparison, key: RowKey) -> list[str]:
    return [run for run, task in zip(comparison.runs, comparison.rows[key], strict=True) if task is not None]


def _notes_on_tests(comparison: Comparison) -> list[str]:
    if len(comparison.runs) < 2:
        return []
    notes = []
    every = [one for row in comparison.differences.values() for one in row if one is not None]
    if not can_test():
        notes.append("no p values: they need scipy, pip install 'trp-scale[evaluation]'")
    elif any(one.test is None for one in every):
        notes.append(f"no p value with fewer than {LEAST_SEEDS} seeds that both runs have, or without finite figures")
    if any(one.test is not None and one.test.test == "sign" for one in every):
        notes.append("sign: the differences are the same on all n seeds, so p is the sign test's")
    uneven = [
        key
        for key, row in comparison.rows.items()
        for task in row[1:]
        if task is not None and row[0] is not None and set(task.seeds) != set(row[0].seeds)
    ]
    if uneven:
        named = ", ".join(dict.fromkeys(key.task for key in uneven))
        notes.append(f"seeds differ between runs ({named}): means are over all of a run's, p over the n that both have")
    return notes


def compare_directories(runs: Sequence[Path]) -> Comparison:
    """Read results.json of each and put them side by side."""
    if not runs:
        raise RefusedError("no run is given; allowed: one or more directories with results.json")
    return compare_results(dict(zip(names(runs), map(read_results, runs), strict=True)))


def names(runs: Sequence[Path]) -> list[str]:
    """Last parts of the paths, as many as tell them apart.

    Raises:
        RefusedError: the same directory twice.
    """
    parts = [path.resolve().parts for path in runs]
    twice = [str(path) for path, count in Counter(map(Path.resolve, runs)).items() if count > 1]
    if twice:
        raise RefusedError(f"{twice[0]} is given twice; allowed: directories that differ")
    for kept in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-kept:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    raise AssertionError("different paths have different parts")
