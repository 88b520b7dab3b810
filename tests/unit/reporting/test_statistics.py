"""Intervals and tests of studies, against scipy and against simulated truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from trp_scale.reporting.statistics import ALPHA, POWER, paired, spread, visible_effect


def test_mean_interval_and_parts_of_the_variance_are_those_of_the_one_way_layout() -> None:
    figures = np.random.default_rng(0).normal(size=(6, 3)) + np.random.default_rng(1).normal(size=(6, 1))
    found = spread(figures.tolist())
    means = figures.mean(1)
    low, high = stats.t.interval(0.95, 5, loc=means.mean(), scale=stats.sem(means))
    assert found.mean == pytest.approx(means.mean())
    assert found.half == pytest.approx((high - low) / 2)
    within = figures.var(1, ddof=1).mean()
    between = max(0.0, means.var(ddof=1) - within / 3)
    assert found.within == pytest.approx(within**0.5)
    assert found.between == pytest.approx(between**0.5)


def test_one_run_has_no_interval() -> None:
    found = spread([[0.5, 0.7]])
    assert (found.mean, found.half, found.between) == (pytest.approx(0.6), None, None)
    assert paired([0.5], [0.7]).test is None


def test_the_test_and_its_interval_are_scipys() -> None:
    one, two = np.random.default_rng(2).normal(size=(2, 5))
    found = paired(one.tolist(), two.tolist())
    reference = stats.ttest_rel(two, one)
    interval = reference.confidence_interval(0.95)
    assert found.test is not None
    assert found.test.p == pytest.approx(reference.pvalue)
    assert found.half is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("runs", [3, 5, 8])
def test_intervals_cover_the_truth_as_often_as_they_say(runs: int) -> None:
    """Runs differ by 1, judgings of a run by 0.5: an interval that counted judgings as runs would be too narrow."""
    generator, covered, trials = np.random.default_rng(runs), 0, 2000
    for _ in range(trials):
        figures = generator.normal(size=(runs, 1)) + 0.5 * generator.normal(size=(runs, 4))
        found = spread(figures.tolist())
        assert found.half is not None
        covered += abs(found.mean) <= found.half
    assert covered / trials == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("level", [ALPHA, ALPHA / 5])
def test_the_visible_difference_is_seen_as_often_as_it_says(level: float) -> None:
    seeds, trials, generator = 5, 4000, np.random.default_rng(7)
    effect = visible_effect(seeds, level) / np.sqrt(seeds)  # in standard deviations of one difference
    differences = generator.normal(effect, 1.0, size=(trials, seeds))
    seen = stats.ttest_1samp(differences, 0.0, axis=1).pvalue < level
    assert seen.mean() == pytest.approx(POWER, abs=0.02)
