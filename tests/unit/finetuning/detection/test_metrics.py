"""VOC 2007's eleven-point average precision, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trp_scale.finetuning.detection.metrics import ClassDetections, Truth, average_precision, overlaps

UNIT = [0.0, 0.0, 10.0, 10.0]
HALF = [0.0, 0.0, 10.0, 5.0]
"""Overlaps UNIT by exactly a half."""
AWAY = [50.0, 50.0, 60.0, 60.0]


def truth(*boxes: list[float], difficult: tuple[int, ...] = ()) -> Truth:
    marks = np.zeros(len(boxes), dtype=np.bool_)
    marks[list(difficult)] = True
    return Truth(boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4), difficult=marks)


def found(*detections: tuple[int, list[float], float]) -> ClassDetections:
    return ClassDetections(
        image=np.array([one[0] for one in detections], dtype=np.int64),
        boxes=np.array([one[1] for one in detections], dtype=np.float64).reshape(-1, 4),
        scores=np.array([one[2] for one in detections], dtype=np.float64),
    )


def test_overlaps() -> None:
    boxes = np.array([UNIT, HALF, AWAY, [5.0, 5.0, 15.0, 15.0], [10.0, 0.0, 20.0, 10.0]])
    assert np.allclose(overlaps(np.array(UNIT), boxes), [1.0, 0.5, 0.0, 25 / 175, 0.0])


def test_all_found_first_is_one_and_nothing_found_is_zero() -> None:
    truths = [truth(UNIT, AWAY), truth(UNIT)]
    assert average_precision(truths, found((0, UNIT, 0.9), (1, UNIT, 0.8), (0, AWAY, 0.7))) == 1.0
    assert average_precision(truths, found()) == 0.0
    assert average_precision(truths, found((1, AWAY, 0.9))) == 0.0


def test_a_class_without_objects_to_find_has_no_precision() -> None:
    assert average_precision([truth(), truth(UNIT, difficult=(0,))], found((0, UNIT, 0.9))) is None


def test_one_of_two_objects_reaches_six_of_the_eleven_recalls() -> None:
    # Recall 1/2 at precision 1: the points 0, 0.1, 0.2, 0.3, 0.4 and 0.5.
    assert average_precision([truth(UNIT, AWAY)], found((0, UNIT, 0.9))) == pytest.approx(6 / 11)


def test_a_wrong_detection_before_a_right_one_halves_every_point() -> None:
    assert average_precision([truth(UNIT)], found((0, AWAY, 0.9), (0, UNIT, 0.8))) == pytest.approx(1 / 2)
    assert average_precision([truth(UNIT)], found((0, UNIT, 0.9), (0, AWAY, 0.8))) == 1.0


def test_precision_is_the_best_at_a_recall_or_beyond_it() -> None:
    # right, wrong, right, right of four objects: recalls 1/4, 1/4, 2/4, 3/4, precisions 1, 1/2, 2/3, 3/4.
    truths = [truth(UNIT, AWAY), truth(UNIT, AWAY)]
    given_ = found((0, UNIT, 0.9), (0, [20, 20, 30, 30], 0.8), (0, AWAY, 0.7), (1, UNIT, 0.6))
    assert average_precision(truths, given_) == pytest.approx((3 * 1.0 + 5 * 0.75) / 11)


def test_an_overlap_of_exactly_a_half_is_enough() -> None:
    assert average_precision([truth(UNIT)], found((0, HALF, 0.5))) == 1.0
    assert average_precision([truth(UNIT)], found((0, [0, 0, 10, 4.99], 0.5))) == 0.0


def test_an_object_is_found_once_by_the_highest_score() -> None:
    # The second detection of the object is wrong, although it lies better.
    twice = found((0, HALF, 0.9), (0, UNIT, 0.8), (0, AWAY, 0.7))
    assert average_precision([truth(UNIT, AWAY)], twice) == pytest.approx((6 * 1.0 + 5 * 2 / 3) / 11)


def test_a_detection_belongs_to_the_object_that_it_overlaps_most() -> None:
    # Both lie on the first object; that the second overlaps the other object by a half as well does not help.
    near = [0.0, 0.0, 10.0, 6.0]
    both = found((0, UNIT, 0.9), (0, [0.0, 0.0, 10.0, 9.0], 0.8))
    assert average_precision([truth(UNIT, near)], both) == pytest.approx(6 / 11)


def test_difficult_objects_count_neither_way() -> None:
    truths = [truth(UNIT, AWAY, difficult=(1,))]
    assert average_precision(truths, found((0, AWAY, 0.9), (0, AWAY, 0.85), (0, UNIT, 0.8))) == 1.0
    assert average_precision(truths, found((0, AWAY, 0.9))) == 0.0


def test_equal_scores_go_in_the_order_they_are_given() -> None:
    truths = [truth(UNIT)]
    assert average_precision(truths, found((0, UNIT, 0.5), (0, AWAY, 0.5))) == 1.0
    # 21 better ones, all wrong, then 20 equal ones, the first of them right. Of few, any sort keeps the order.
    many = [(0, AWAY, 0.5 if place % 2 else 0.7) for place in range(41)]
    many[1] = (0, UNIT, 0.5)
    assert average_precision(truths, found(*many)) == pytest.approx(1 / 22)
    assert average_precision(truths, found((0, AWAY, 0.5), (0, UNIT, 0.5))) == pytest.approx(1 / 2)


def test_three_of_ten_objects_reach_the_recall_of_three_tenths() -> None:
    boxes = [[20.0 * number, 0.0, 20.0 * number + 10, 10.0] for number in range(10)]
    three = found(*((0, box, 0.9) for box in boxes[:3]))
    assert average_precision([truth(*boxes)], three) == pytest.approx(4 / 11)


def plainly(right: list[bool], objects: int) -> float:
    """The definition, in loops: at each recall the best precision of any longer list of detections."""
    total = 0.0
    for point in range(11):
        best = 0.0
        for length in range(1, len(right) + 1):
            hits = sum(right[:length])
            if hits * 10 >= point * objects:
                best = max(best, hits / length)
        total += best
    return total / 11


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 5))
def test_the_mean_of_eleven_points_is_the_definition(right: list[bool], more: int) -> None:
    objects = sum(right) + more
    boxes = [[20.0 * number, 0.0, 20.0 * number + 10, 10.0] for number in range(objects)]
    hits = iter(boxes)
    listed = [(0, next(hits) if hit else AWAY, 1.0 - 0.01 * place) for place, hit in enumerate(right)]
    value = average_precision([truth(*boxes)], found(*listed))
    assert value is None if objects == 0 else value == pytest.approx(plainly(right, objects))
