"""Paired tests, their correction and intervals, against scipy, by hand and against simulated truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from trp_scale.reporting.paired_tests import (
    POWER,
    SIGNIFICANT,
    holm,
    paired_difference,
    paired_test,
    spread,
    visible_effect,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("first", "second", "p", "test"),
    [
        ([0.3, 0.4, 0.5], [0.3, 0.4, 0.5], 1.0, "equal"),
        ([0.0, 0.0], [0.0, 0.0], 1.0, "equal"),
        ([0.1, 0.2, 0.7], [0.2, 0.3, 0.8], 0.25, "sign"),  # 0.1 each, but for rounding
        ([0.5, 0.5], [0.25, 0.25], 0.5, "sign"),
    ],
)
def test_equal_differences_have_a_defined_p_value(first: list[float], second: list[float], p: float, test: str) -> None:
    result = paired_test(first, second)
    assert (result.p, result.test) == (p, test)


def test_holm_by_hand() -> None:
    """Holm 1979: of 0.01, 0.02, 0.03, 0.04 the factors are 4, 3, 2, 1, and none is below the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.02]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []
    values = [0.001, 0.2, 0.011, 0.04, 0.5]
    looser = stats.false_discovery_control(values, method="bh")
    assert all(one >= two for one, two in zip(holm(values), looser, strict=True))


def test_mean_interval_and_parts_of_the_variance_are_those_of_the_one_way_layout() -> None:
    figures = np.random.default_rng(0).normal(size=(6, 3)) + np.random.default_rng(1).normal(size=(6, 1))
    result = spread(figures.tolist())
    means = figures.mean(1)
    low, high = stats.t.interval(0.95, 5, loc=means.mean(), scale=stats.sem(means))
    assert result.mean == pytest.approx(means.mean())
    assert result.half == pytest.approx((high - low) / 2)
    within = figures.var(1, ddof=1).mean()
    between = max(0.0, means.var(ddof=1) - within / 3)
    assert result.within == pytest.approx(within**0.5)
    assert result.between == pytest.approx(between**0.5)


def test_one_run_has_no_interval() -> None:
    result = spread([[0.5, 0.7]])
    assert (result.mean, result.half, result.between) == (pytest.approx(0.6), None, None)
    difference = paired_difference({0: 0.5}, {0: 0.7})
    assert difference is not None and difference.test is None and difference.half is None


def test_the_test_and_its_interval_are_scipys() -> None:
    one, two = np.random.default_rng(2).normal(size=(2, 5))
    result = paired_difference(dict(enumerate(one.tolist())), dict(enumerate(two.tolist())))
    assert result is not None
    reference = stats.ttest_rel(two, one)
    interval = reference.confidence_interval(0.95)
    assert result.test is not None
    assert result.test.p == pytest.approx(reference.pvalue)
    assert result.half is not None
    assert (result.value - result.half, result.value + result.half) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("level", [SIGNIFICANT, SIGNIFICANT / 5])
def test_the_visible_difference_is_seen_as_often_as_it_says(level: float) -> None:
    seeds, trials, generator = 5, 4000, np.random.default_rng(7)
    effect = visible_effect(seeds, level) / np.sqrt(seeds)  # in standard deviations of one difference
    differences = generator.normal(effect, 1.0, size=(trials, seeds))
    seen = stats.ttest_1samp(differences, 0.0, axis=1).pvalue < level
    assert seen.mean() == pytest.approx(POWER, abs=0.02)


@pytest.mark.parametrize(("hits", "count"), [(0, 3), (3, 3), (5, 10), (997, 1000)])
def test_the_interval_of_a_share_is_scipys(hits: int, count: int) -> None:
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
