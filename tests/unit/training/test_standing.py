"""What the display knows of a run: smoothed losses, curves of bounded length, and the last lines of metrics."""

from __future__ import annotations

import pytest

from tests.unit.training.small_run import record
from trp_scale.training.records import RunInfo
from trp_scale.training.standing import HORIZON, POINTS, SparkLine, Standing, sparks


def test_a_curve_is_an_average_without_the_bias_of_its_start() -> None:
    curve, values = SparkLine(), [4.0, 2.0, 7.0, 1.0]
    for value in values:
        curve.add(value)
    keep = 1 - 1 / HORIZON
    weights = [keep**age for age in range(len(values))][::-1]
    assert curve.now == pytest.approx(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    assert curve.points[0] == curve.first == 4.0 and curve.change == curve.now - 4.0


def test_a_curve_of_any_length_has_few_points_at_even_distances() -> None:
    curve = SparkLine()
    for step in range(10_000):
        curve.add(float(step))
    assert POINTS // 2 <= len(curve.points) < POINTS
    gaps = {round(later - earlier) for earlier, later in zip(curve.points[5:], curve.points[6:], strict=False)}
    assert len(gaps) == 1
    assert curve.now == pytest.approx(10_000 - HORIZON, abs=1)
    drawn = curve.drawn(24)
    assert len(drawn) == 24 and (drawn[0], drawn[-1]) == ("▁", "█") and list(drawn) == sorted(drawn)


def test_sparks_go_from_the_lowest_to_the_highest() -> None:
    assert sparks([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparks([5.0, 5.0]) == "▁▁" and sparks([]) == ""


def test_it_tells_what_lines_of_metrics_say() -> None:
    standing = Standing(RunInfo(positions_per_step=1000, shown={"adversary": ("norm", "effect", "saturated")}))
    standing.update(record(1), 2000.0, "noun")
    assert standing.steps() == "loss 4.9000  lr 1.00e-03  worst noun 5.9000  2,000 tokens/s"
    assert list(standing.more()) == []
    standing.line({"step": 1, "peak_memory_bytes": 3 << 30, "data_wait_share": 0.021})
    standing.line({"step": 2, "validation": {"loss": 5.25}, "adversary": {"norm": 0.123456, "effect": None}})
    assert list(standing.more()) == [
        "held out 5.2500 at step 2  memory 3.0 GiB  waits for data 2%",
        "adversary: norm 0.1235",
    ]
    standing.line({"step": 3, "validation": None, "adversary": {}})
    assert len(list(standing.more())) == 2, "what was known stays"


def test_it_tells_the_accuracy_of_each_task_that_has_one() -> None:
    standing = Standing(RunInfo(positions_per_step=1000))
    tasks = {"noun": {"loss": 5.0, "accuracy": 0.061}, "verb": {"loss": 4.0, "accuracy": None}, "next": {"loss": 0.7}}
    standing.line({"step": 4, "validation": {"loss": 5.25, "tasks": tasks | {"adverb": {"accuracy": 0.5}}}})
    assert list(standing.more()) == ["held out 5.2500 at step 4", "right of those held out: noun 6.1%  adverb 50.0%"]
    standing.line({"step": 8, "validation": {"loss": 5.0, "tasks": {"noun": {"loss": 5.0, "accuracy": 0.07}}}})
    assert list(standing.more())[1] == "right of those held out: noun 7.0%"


def test_the_worst_task_has_its_change_and_images_are_images() -> None:
    standing = Standing(RunInfo(positions_per_step=1000, images_per_step=10))
    for step in range(1, 4):
        standing.update(record(step), 2000.0, "noun")
    change = standing.curves["noun"].change
    assert f"worst noun {5.9 + change:.4f} ({change:+.4f})  20 images/s" in standing.steps() and change < 0
