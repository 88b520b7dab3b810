"""Curves of metrics: what is averaged says so, keeps its extremes, and a run that went back has one value a step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.reporting.small_runs import line, task
from trp_scale.reporting.record import MOST_POINTS, Curve, RunCurves


def curve_of(values: np.ndarray, counts: np.ndarray | None = None) -> Curve:
    curve = Curve()
    for place, value in enumerate(values):
        curve.add(place + 1, float(value), None if counts is None else float(counts[place]))
    return curve


def test_a_short_curve_is_drawn_as_it_is() -> None:
    points = curve_of(np.arange(MOST_POINTS) / 8).points()
    assert points.values == list(np.arange(MOST_POINTS) / 8)
    assert points.steps == list(range(1, MOST_POINTS + 1))
    assert points.averaged == 1 and not points.least and not points.largest


@pytest.mark.parametrize("size", [MOST_POINTS + 1, 12_345])
def test_a_long_curve_keeps_its_extremes_and_its_mean(size: int) -> None:
    values = np.random.default_rng(0).normal(size=size)
    values[size // 3], values[size // 2] = 50.0, -40.0
    points = curve_of(values).points()
    assert len(points.steps) == len(points.least) == len(points.largest) <= MOST_POINTS
    assert max(points.largest) == 50.0 and min(points.least) == -40.0
    assert all(low <= mean <= high for low, mean, high in zip(points.least, points.values, points.largest, strict=True))
    sizes = np.full(len(points.values), points.averaged)
    sizes[-1] = size - points.averaged * (len(points.values) - 1)
    assert np.average(points.values, weights=sizes) == pytest.approx(values.mean(), abs=1e-6)
    # The extreme stands where it was.
    place = points.largest.index(50.0)
    assert abs(points.steps[place] - (size // 3 + 1)) <= points.averaged


def test_means_count_by_elements() -> None:
    values, counts = np.tile([1.0, 4.0], MOST_POINTS), np.tile([3.0, 1.0], MOST_POINTS)
    assert set(curve_of(values, counts).points().values) == {1.75}


def test_what_is_not_finite_is_left_out() -> None:
    curve = Curve()
    for step, value in enumerate((1.0, float("nan"), float("inf"), 10**400, 2.0), start=1):
        curve.add(step, value)
    assert list(curve.steps) == [1.0, 5.0]


def test_the_later_start_stands_where_a_run_went_back() -> None:
    curves = RunCurves()
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0), (2, 3.0), (3, 2.0)):
        curves.take(line(step, {"noun": task(loss)}, applied=loss != 9.0, hook={"value": loss}))
    assert list(curves.losses["noun"].values) == [5.0, 3.0, 2.0]
    assert list(curves.hooks["hook"]["value"].steps) == [1.0, 2.0, 3.0]
    assert curves.skipped == []


def test_numbers_of_any_hook_are_kept_and_its_own_step_is_where_it_measured() -> None:
    curves = RunCurves()
    values = {"step": 8, "found": 0.5, "by": {"a": 1, "b": 2.0}, "kind": "new", "on": True, "none": None, "list": [1]}
    curves.take(line(10, {"noun": task(1.0)}, probe=values))
    tree = curves.hooks["probe"]
    assert list(tree["found"].steps) == [8.0] and set(tree["by"]) == {"a", "b"}
    assert curves.words["probe"] == {"kind": "new"}
    assert not {"on", "none", "list"} & set(tree)


def test_a_name_that_changes_its_kind_is_not_mixed() -> None:
    curves = RunCurves()
    curves.take(line(1, {"noun": task(1.0)}, hook={"value": 1.0}))
    curves.take(line(2, {"noun": task(1.0)}, hook={"value": {"a": 2.0}}))
    assert list(curves.hooks["hook"]["value"].values) == [1.0]
