"""Confidence intervals, variance components, paired tests with Holm's correction, and detectable differences.

Runs differ by pre-training seed, measurements of one run by judging seed. Figures of one run are not independent, so
each run counts once, with its mean; intervals and tests are over runs (Student's t). Compared runs share seeds: the
same initial weights, data order and judging, so tests are paired. scipy.special is used because scipy.stats takes a
millisecond per test.
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
"""Confidence level of intervals."""

SIGNIFICANT = 0.05
"""Significance level of corrected p values."""

POWER = 0.8
"""Power for the detectable difference."""

ROUNDING = 1e-12
"""Differences that vary by less than this share of the largest figure count as equal."""


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the interval at LEVEL of a proportion that is `share` among `count` rows (Wilson 1927)."""
    z = statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2)
    scale = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Two-sided paired test.

    Attributes:
        seeds: number of common seeds.
        p: uncorrected.
        test: "t": paired t-test; "sign": sign test; "equal": no difference to test.
    """

    seeds: int
    p: float
    test: str


def can_test() -> bool:
    """Return whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Run a paired t-test on two or more finite figures of the same seeds. If all differences are equal, the t-test is
    undefined: p is 1 if they are 0, otherwise 2^(1-n) from the exact sign test."""
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
    """Correct p values for multiple tests (Holm 1979): the k-th smallest of m, from 0, is multiplied by m - k, at least
    the previous one and at most 1."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=lambda number: values[number])):
        largest = max(largest, min(1.0, values[number] * (len(values) - rank)))
        corrected[number] = largest
    return corrected


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of a mean from the baseline's.

    Attributes:
        value: positive is better unless the metric is an error.
        error: standard error over common seeds; `None` without a test.
        test: `None` with fewer than two common seeds, non-finite figures, or without scipy.
        corrected: Holm-corrected p value; `None` without a test.
        family: number of tests in the correction.
    """

    value: float
    error: float | None = None
    test: PairedTest | None = None
    corrected: float | None = None
    family: int = 1

    @property
    def is_significant(self) -> bool:
        """Return whether the corrected p value is below SIGNIFICANT."""
        return self.corrected is not None and self.corrected < SIGNIFICANT

    @property
    def half(self) -> float | None:
        """Half width of the interval at LEVEL; `None` without a test."""
        return None if self.error is None or self.test is None else quantile(self.test.seeds - 1) * self.error

    @property
    def visible(self) -> float | None:
        """Smallest difference that the test detects with POWER at the corrected level; `None` without a test."""
        if self.error is None or self.test is None:
            return None
        return self.error * visible_effect(self.test.seeds, SIGNIFICANT / self.family)


def paired_difference(baseline: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Return the mean difference over common seeds, and its test; `None` without a common seed. Figures are by
    seed."""
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
    """Return the tested differences with Holm-corrected p values."""
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
    """Return the detectable difference divided by its standard error, for a two-sided paired t-test of `count` pairs at
    `level` with POWER, from the noncentral t distribution."""
    from scipy.special import nctdtrinc, stdtrit

    return float(nctdtrinc(count - 1, 1 - POWER, stdtrit(count - 1, 1 - level / 2)))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Statistics of several runs.

    Attributes:
        mean: over the runs' means.
        half: half width of its interval at LEVEL; `None` for one run.
        between: standard deviation between pre-training seeds; `None` for one run.
        within: standard deviation between judging seeds; `None` with one judging seed.
        runs: number of runs.
    """

    mean: float
    half: float | None
    between: float | None
    within: float | None
    runs: int


def spread(figures: Sequence[Sequence[float]]) -> Spread:
    """Estimate mean, interval and variance components of figures [runs][judgings] by a one-way random effects model:
    the variance of the runs' means is the variance between runs plus the variance within divided by the number of
    judgings."""
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
