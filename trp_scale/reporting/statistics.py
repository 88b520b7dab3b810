"""Intervals, parts of the variance, paired tests and what they could have seen.

Runs differ by their pre-training seed, and judgings of one run by theirs. Figures of one run are not independent, so
each run counts once, by the mean of its judgings; intervals and tests are over runs (Student's t). Variants share
seeds: the same initial weights, order of data and judging, so differences are taken seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trp_scale.reporting.paired_tests import PairedTest, paired_test

LEVEL = 0.95
"""Of intervals."""

ALPHA = 0.05
"""Largest corrected p value that is called a difference."""

POWER = 0.8
"""Of the smallest difference that is named."""


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
    within = statistics.fmean(statistics.variance(run) for run in figures) if judgings > 1 else None
    if count < 2:
        return Spread(mean=mean, half=None, between=None, within=None if within is None else math.sqrt(within), runs=1)
    variance = statistics.variance(means)
    between = max(0.0, variance - (within or 0.0) / judgings)
    return Spread(
        mean=mean,
        half=quantile(count - 1) * math.sqrt(variance / count),
        between=math.sqrt(between),
        within=None if within is None else math.sqrt(within),
        runs=count,
    )


def quantile(freedom: int) -> float:
    """Return the two-sided quantile of Student's t at LEVEL."""
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A variant less the baseline, seed by seed.

    Attributes:
        mean: difference; positive is better only where more is.
        half: half of its interval at LEVEL; None of one seed.
        test: None of one seed.
        visible: smallest difference that a test at the corrected level would have seen with POWER; None of one seed.
    """

    mean: float
    half: float | None
    test: PairedTest | None
    visible: float | None


def paired(baseline: Sequence[float], other: Sequence[float], *, tests: int = 1) -> Paired:
    """The comparison of two variants.

    Args:
        baseline, other: figures of the same seeds.
        tests: that are corrected for together; the smallest visible difference is at ALPHA / tests.
    """
    differences = [two - one for one, two in zip(baseline, other, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Paired(mean=mean, half=None, test=None, visible=None)
    error = statistics.stdev(differences) / math.sqrt(count)
    return Paired(
        mean=mean,
        half=quantile(count - 1) * error,
        test=paired_test(baseline, other),
        visible=error * visible_effect(count, ALPHA / tests),
    )


def visible_effect(count: int, level: float) -> float:
    """Difference over its standard error that a two-sided paired t-test of `count` pairs at `level` sees with POWER, by
    the noncentral t distribution."""
    from scipy import optimize, stats

    freedom = count - 1
    edge = stats.t.ppf(1 - level / 2, freedom)

    def missing(effect: float) -> float:
        return float(stats.nct.sf(edge, freedom, effect)) - POWER

    return float(optimize.brentq(missing, 0.0, 50.0 * (1 + edge)))
