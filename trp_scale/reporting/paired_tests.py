"""Intervals, parts of the variance, paired tests with their correction, and the difference that they could have seen.

Runs differ by their pre-training seed, and judgings of one run by theirs. Figures of one run are not independent, so
each run counts once, by the mean of its judgings; intervals and tests are over runs (Student's t). Runs that are
compared share seeds: the same initial weights, order of data and judging, so differences are taken seed by seed.
scipy.special is used because scipy.stats takes a millisecond for each test.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

LEAST_SEEDS = 2
"""Fewest seeds of a paired test."""

LEVEL = 0.95
"""Of intervals."""

SIGNIFICANT = 0.05
"""A difference is one if its corrected p value is below."""

POWER = 0.8
"""Of the smallest difference that is named."""

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
    differences = [after - before for before, after in zip(first, second, strict=True)]
    count = len(differences)
    if count < LEAST_SEEDS:
        raise ValueError(f"{count} seeds that both runs have, at least {LEAST_SEEDS} allowed")
    size = ROUNDING * max(abs(value) for value in (*first, *second))
    if max(abs(difference) for difference in differences) <= size:
        return PairedTest(seeds=count, p=1.0, test="equal")
    if max(differences) - min(differences) <= size:
        return PairedTest(seeds=count, p=2.0 ** (1 - count), test="sign")
    from scipy.special import stdtr

    t = statistics.fmean(differences) / (statistics.stdev(differences) / math.sqrt(count))
    return PairedTest(seeds=count, p=2.0 * float(stdtr(count - 1, -abs(t))), test="t")


def holm(values: Sequence[float]) -> list[float]:
    """Each p value corrected for there being several (Holm 1979), in the order given: the k-th smallest of m, from 0,
    times m - k, no smaller than the one before it, 1 at most."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=lambda number: values[number])):
        largest = max(largest, min(1.0, values[number] * (len(values) - rank)))
        corrected[number] = largest
    return corrected


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A run's or variant's mean less the baseline's.

    Attributes:
        value: positive is better only where the metric is not an error.
        error: standard error of the mean over common seeds; None without a test.
        test: None with fewer than two common seeds, a figure that is no finite number, or without scipy.
        corrected: Holm's p value over all tests of its family; None without a test.
        family: number of these tests.
    """

    value: float
    error: float | None = None
    test: PairedTest | None = None
    corrected: float | None = None
    family: int = 1

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p value is below SIGNIFICANT."""
        return self.corrected is not None and self.corrected < SIGNIFICANT

    @property
    def half(self) -> float | None:
        """Half of the interval at LEVEL; None without a test."""
        return None if self.error is None or self.test is None else quantile(self.test.seeds - 1) * self.error

    @property
    def visible(self) -> float | None:
        """Smallest difference that a test at the corrected level would have seen with POWER; None without a test."""
        if self.error is None or self.test is None:
            return None
        return self.error * visible_effect(self.test.seeds, SIGNIFICANT / self.family)


def paired_difference(baseline: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Return the mean difference over the seeds that both have, and its test; `None` without a common seed.

    Args:
        baseline, other: figures by seed.
    """
    common = sorted(baseline.keys() & other.keys())
    first, second = ([figures[seed] for seed in common] for figures in (baseline, other))
    if not common:
        return None
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(common) < LEAST_SEEDS or not can_test() or not all(map(math.isfinite, (*first, *second))):
        return Difference(value=mean)
    error = statistics.stdev(differences) / math.sqrt(len(common))
    return Difference(value=mean, error=error, test=paired_test(first, second))


def correct(family: Mapping[Key, Difference]) -> dict[Key, Difference]:
    """Return the tested ones of the differences, with the p values that Holm's correction over all of them gives."""
    tests = {key: difference.test for key, difference in family.items() if difference.test is not None}
    corrected = holm([test.p for test in tests.values()])
    return {
        key: replace(family[key], corrected=value, family=len(tests))
        for key, value in zip(tests, corrected, strict=True)
    }


def quantile(freedom: int) -> float:
    """Return the two-sided quantile of Student's t at LEVEL."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def visible_effect(count: int, level: float) -> float:
    """Difference over its standard error that a two-sided paired t-test of `count` pairs at `level` sees with POWER, by
    the noncentral t distribution."""
    from scipy.special import nctdtrinc, stdtrit

    return float(nctdtrinc(count - 1, 1 - POWER, stdtrit(count - 1, 1 - level / 2)))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Figures of several runs.

    Attributes:
        mean: of the runs' means.
        half: half of the interval of that mean at LEVEL; None of one run.
        between: standard deviation that pre-training seeds add; None of one run.
        within: standard deviation over judgings of one run; None with one judging each.
        runs: their number.
    """

    mean: float
    half: float | None
    between: float | None
    within: float | None
    runs: int


def spread(figures: Sequence[Sequence[float]]) -> Spread:
    """Mean, interval and parts of the variance by a one-way layout with random effects: the variance of the runs' means
    is that between runs plus that within divided by the number of judgings.

    Args:
        figures: [runs][judgings].
    """
    means = [statistics.fmean(run) for run in figures]
    mean, count = statistics.fmean(means), len(means)
    judgings = min(len(run) for run in figures)
    variance = statistics.fmean(statistics.variance(run) for run in figures) if judgings > 1 else None
    within = None if variance is None else math.sqrt(variance)
    if count < 2:
        return Spread(mean=mean, half=None, between=None, within=within, runs=1)
    total = statistics.variance(means)
    return Spread(
        mean=mean,
        half=quantile(count - 1) * math.sqrt(total / count),
        between=math.sqrt(max(0.0, total - (variance or 0.0) / judgings)),
        within=within,
        runs=count,
    )
