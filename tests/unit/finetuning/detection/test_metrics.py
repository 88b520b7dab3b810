"""VOC 2007's eleven-point average precision, counted by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.finetuning.detection.small_sets import coco_document, write_coco, write_voc
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.finetuning.detection.annotations import Annotations, decode, read_coco, read_voc
from trp_scale.finetuning.detection.metrics import (
    VOC_METRIC,
    ClassDetections,
    DetectionMetrics,
    InferenceSpeed,
    Truth,
    average_precision,
    to_image_pixels,
)

UNIT = [0.0, 0.0, 10.0, 10.0]
HALF = [0.0, 0.0, 10.0, 5.0]
"""Overlaps UNIT by exactly a half."""
AWAY = [50.0, 50.0, 60.0, 60.0]


def truth(*boxes: list[float], difficult: tuple[int, ...] = ()) -> Truth:
    marks = np.zeros(len(boxes), dtype=np.bool_)
    marks[list(difficult)] = True
    return np.array(boxes, dtype=np.float64).reshape(-1, 4), marks


def class_detections(*detections: tuple[int, list[float], float]) -> ClassDetections:
    return ClassDetections(
        image=np.array([one[0] for one in detections], dtype=np.int64),
        boxes=np.array([one[1] for one in detections], dtype=np.float64).reshape(-1, 4),
        scores=np.array([one[2] for one in detections], dtype=np.float64),
    )


def test_a_class_without_objects_to_find_has_no_precision() -> None:
    assert average_precision([truth(), truth(UNIT, difficult=(0,))], class_detections((0, UNIT, 0.9))) is None


def test_an_overlap_of_exactly_a_half_is_enough() -> None:
    assert average_precision([truth(UNIT)], class_detections((0, HALF, 0.5))) == 1.0
    assert average_precision([truth(UNIT)], class_detections((0, [0, 0, 10, 4.99], 0.5))) == 0.0


def test_an_object_is_found_once_by_the_highest_score() -> None:
    # The second detection of the object is wrong, although it lies better.
    twice = class_detections((0, HALF, 0.9), (0, UNIT, 0.8), (0, AWAY, 0.7))
    assert average_precision([truth(UNIT, AWAY)], twice) == pytest.approx((6 * 1.0 + 5 * 2 / 3) / 11)


def test_a_detection_belongs_to_the_object_that_it_overlaps_most() -> None:
    # Both lie on the first object; that the second overlaps the other object by a half as well does not help.
    near = [0.0, 0.0, 10.0, 6.0]
    both = class_detections((0, UNIT, 0.9), (0, [0.0, 0.0, 10.0, 9.0], 0.8))
    assert average_precision([truth(UNIT, near)], both) == pytest.approx(6 / 11)


def test_difficult_objects_count_neither_way() -> None:
    truths = [truth(UNIT, AWAY, difficult=(1,))]
    assert average_precision(truths, class_detections((0, AWAY, 0.9), (0, AWAY, 0.85), (0, UNIT, 0.8))) == 1.0
    assert average_precision(truths, class_detections((0, AWAY, 0.9))) == 0.0


def test_equal_scores_go_in_the_order_they_are_given() -> None:
    truths = [truth(UNIT)]
    assert average_precision(truths, class_detections((0, UNIT, 0.5), (0, AWAY, 0.5))) == 1.0
    # 21 better ones, all wrong, then 20 equal ones, the first of them right. Of few, any sort keeps the order.
    many = [(0, AWAY, 0.5 if place % 2 else 0.7) for place in range(41)]
    many[1] = (0, UNIT, 0.5)
    assert average_precision(truths, class_detections(*many)) == pytest.approx(1 / 22)
    assert average_precision(truths, class_detections((0, AWAY, 0.5), (0, UNIT, 0.5))) == pytest.approx(1 / 2)


def average_precision_by_loops(right: list[bool], objects: int) -> float:
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
    value = average_precision([truth(*boxes)], class_detections(*listed))
    assert value is None if objects == 0 else value == pytest.approx(average_precision_by_loops(right, objects))


SCALE = 4.0
"""Images of 12 x 16 pixels in squares of 64."""


@dataclass(frozen=True)
class TwoRanks(Group):
    """A group whose other rank has found `others`."""

    others: tuple[Any, ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        return [list(self.others), value]


def batch_of(data: Annotations, images: list[int], start: int = 0, there: list[float] | None = None) -> Batch:
    sizes = torch.from_numpy(data.sizes[images])
    return Batch(
        fields={
            "row_weights": torch.tensor(there or [1.0] * len(images)),
            "sizes": sizes,
            "resized": (sizes * SCALE).long(),
            "image": torch.tensor([[0, image] for image in images]),
        },
        keys=torch.zeros(len(images)),
        start=start,
    )


def detections(*objects: tuple[list[float], int, float], masks: bool = True) -> dict[str, torch.Tensor]:
    """Of one image, boxes in its own pixels, with masks that fill them."""
    boxes = torch.tensor([one[0] for one in objects]).reshape(-1, 4) * SCALE
    target = {
        "boxes": boxes,
        "labels": torch.tensor([one[1] for one in objects], dtype=torch.int64),
        "scores": torch.tensor([one[2] for one in objects]),
    }
    return {**target, "masks": torch.ones(len(objects), 1, 28, 28)} if masks else target


@pytest.fixture
def coco(tmp_path: Path) -> Annotations:
    """Image 0 has a brush (3) and a cat (2), image 1 a plane (1); a crowd of planes is in image 0."""
    document = coco_document()
    document["annotations"][3]["bbox"] = [0, 0, 3, 3]
    document["annotations"][3]["segmentation"] = [[0, 0, 0, 3, 3, 3, 3, 0]]
    document["annotations"][2]["segmentation"] = [[1, 1, 1, 4, 4, 4, 4, 1]]
    return read_coco(write_coco(tmp_path, document))


BRUSH = ([4.0, 2.0, 10.0, 8.0], 3, 0.9)
CAT = ([0.0, 0.0, 3.0, 3.0], 2, 0.8)
PLANE = ([0.0, 2.0, 2.0, 5.0], 1, 0.7)
CROWD = ([1.0, 1.0, 3.0, 3.0], 1, 0.95)


def test_perfect_detections_have_metrics_of_1(coco: Annotations) -> None:
    metrics = DetectionMetrics([coco])
    metrics.add([detections(BRUSH, CAT, CROWD), detections(PLANE)], batch_of(coco, [0, 1]))
    figures = metrics.finish(ALONE)
    detail = figures.pop("detail")
    assert set(figures) == {f"{part}{name}" for part in ("", "mask_") for name in ("AP", "AP50", "AP75", "APs")}
    assert all(value == pytest.approx(1.0) for value in figures.values()), "the crowd is no wrong detection"
    assert detail["AP"] == detail["mask_AP"] == {name: pytest.approx(1.0) for name in ("plane", "cat", "brush")}


def test_coco_figures_by_hand(coco: Annotations) -> None:
    # The brush is found with an overlap of 30 / 36, which seven of the ten thresholds allow; the plane comes after a
    # wrong one, so its precision is a half; the cat is not found.
    metrics = DetectionMetrics([coco])
    moved = ([4.0, 2.0, 10.0, 7.0], 3, 0.9)
    wrong = ([8.0, 8.0, 11.0, 11.0], 1, 0.8)
    metrics.add([detections(moved, masks=False), detections(wrong, PLANE, masks=False)], batch_of(coco, [0, 1]))
    figures = metrics.finish(ALONE)
    assert figures["detail"]["AP"] == {"plane": pytest.approx(0.5), "cat": 0.0, "brush": pytest.approx(0.7)}
    assert figures["AP"] == pytest.approx((0.5 + 0.0 + 0.7) / 3)
    assert figures["AP50"] == pytest.approx(0.5) and figures["AP75"] == pytest.approx(0.5)
    assert "mask_AP" not in figures and "APl" not in figures


def test_two_ranks_equal_one_and_padding_rows_are_ignored(coco: Annotations) -> None:
    wrong = ([8.0, 8.0, 11.0, 11.0], 1, 0.7)  # before the plane's row, and with its score
    rows = [detections(BRUSH, CROWD, wrong), detections(PLANE, CAT)]
    alone, first, second = (DetectionMetrics([coco]) for _ in range(3))
    alone.add(rows, batch_of(coco, [0, 1]))
    second.add(rows[1:] + rows[:1], batch_of(coco, [1, 0], start=1, there=[1.0, 0.0]))
    first.add(rows[:1], batch_of(coco, [0]))
    group = TwoRanks("data", rank=1, size=2, others=tuple(second._detections))
    assert first.finish(cast(Group, group)) == (figures := alone.finish(ALONE))
    assert figures["detail"]["AP"]["plane"] == pytest.approx(0.5)


def test_no_detections_give_0_and_no_objects_are_refused(coco: Annotations, tmp_path: Path) -> None:
    metrics = DetectionMetrics([coco])
    metrics.add([detections(masks=False), detections(masks=False)], batch_of(coco, [0, 1]))
    assert metrics.finish(ALONE)["AP"] == 0.0
    document = coco_document()
    document["annotations"] = [{**document["annotations"][0], "iscrowd": 1}]
    metrics = DetectionMetrics([read_coco(write_coco(tmp_path / "none", document))])
    metrics.add([detections(BRUSH, masks=False)], batch_of(coco, [0]))
    with pytest.raises(RefusedError, match=r"--data.validation_fraction"):
        metrics.finish(ALONE)


def test_boxes_are_scaled_back_and_cut_to_the_image() -> None:
    target = detections(
        ([4.0, 2.0, 10.0, 8.0], 1, 0.9), ([10.0, 6.0, 16.0, 16.0], 1, 0.8), ([2.0, 13.0, 5.0, 16.0], 1, 0.7)
    )
    found = to_image_pixels(target, [12, 16], [48, 64])
    assert found["boxes"].tolist() == [[4, 2, 10, 8], [10, 6, 16, 12]], "the third lies below the image"
    assert found["scores"].tolist() == pytest.approx([0.9, 0.8])
    mask = decode(found["masks"][0], 12, 16)
    exact = np.zeros((12, 16), dtype=np.uint8)
    exact[2:8, 4:10] = 1
    assert (mask == exact).all()


def test_a_mask_stays_in_place_where_its_box_reaches_into_the_padding() -> None:
    # 8 x 16 pixels in a square of 16 x 16: the box is all of the square, and the mask its upper half, all of the image.
    target = detections(([0.0, 0.0, 16.0, 16.0], 1, 0.9))
    target["masks"][:, :, 14:] = 0
    found = to_image_pixels(target, [8, 16], [32, 64])
    assert found["boxes"].tolist() == [[0, 0, 16, 8]]
    assert (decode(found["masks"][0], 8, 16) == 1).all()


def test_a_mask_is_what_is_more_likely_than_not() -> None:
    target = detections(BRUSH)
    target["masks"][:, :, :, :14], target["masks"][:, :, :, 14:] = 0.45, 0.55
    mask = decode(to_image_pixels(target, [12, 16], [48, 64])["masks"][0], 12, 16)
    assert np.flatnonzero(mask.any(0)).tolist() == [7, 8, 9], "the right half of columns 4 to 9"


def test_objects_are_small_or_large_by_the_area_that_the_file_says(tmp_path: Path) -> None:
    document = coco_document()
    document["annotations"][0]["area"] = 50**2  # the brush, between 32^2 and 96^2
    data = read_coco(write_coco(tmp_path, document))
    metrics = DetectionMetrics([data])
    metrics.add([detections(BRUSH), detections()], batch_of(data, [0, 1]))
    figures = metrics.finish(ALONE)
    assert figures["APm"] == figures["mask_APm"] == pytest.approx(1.0)
    assert figures["APs"] == figures["mask_APs"] == 0.0 and "APl" not in figures


def test_voc_is_judged_by_its_own_precision_with_difficult_objects_ignored(tmp_path: Path) -> None:
    images = {
        "1": [("cat", 0, (1, 1, 10, 10)), ("dog", 0, (11, 1, 20, 10))],
        "2": [("cat", 0, (1, 1, 10, 10)), ("dog", 1, (11, 1, 20, 10)), ("owl", 1, (1, 1, 5, 5))],
    }
    data = read_voc(write_voc(tmp_path, images))
    metrics = DetectionMetrics([data])
    left, right = [0.0, 0.0, 10.0, 10.0], [10.0, 0.0, 20.0, 10.0]
    first = detections((left, 1, 0.9), (right, 2, 0.4), masks=False)
    second = detections((right, 2, 0.9), (right, 1, 0.8), masks=False)
    metrics.add([first, second], batch_of(data, [0, 1]))
    figures = metrics.finish(ALONE)
    # Cats: right, then wrong, one of two found: 6 points of precision 1. Dogs: the difficult one counts neither way.
    assert figures["detail"][VOC_METRIC] == {"cat": pytest.approx(6 / 11), "dog": 1.0}
    assert figures[VOC_METRIC] == pytest.approx((6 / 11 + 1.0) / 2)
    # With a score of a half or more: one of two detections is right, one of three objects is found.
    assert figures["precision90"] == 1 / 2 and figures["recall90"] == 1 / 3


IntegerBox = tuple[int, int, int, int]


def random_box(draws: np.random.Generator) -> IntegerBox:
    left, top = (int(number) for number in draws.integers(0, (22, 12)))
    width, height = (int(number) for number in draws.integers(3, 9, size=2))
    return left, top, left + width, top + height


def nearby(box: IntegerBox, draws: np.random.Generator) -> IntegerBox:
    """Moved by a pixel at most on each side."""
    left, top, right, bottom = (side + int(draws.integers(-1, 2)) for side in box)
    return max(0, left), max(0, top), min(30, right), min(20, bottom)


def pixels(box: IntegerBox) -> set[tuple[int, int]]:
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


def count_by_loops(
    objects: list[tuple[int, int, IntegerBox, bool]], found: list[tuple[int, int, IntegerBox, float]], percent: int
) -> tuple[int, int, int]:
    """True positives, detections that count, and objects, pixel by pixel; each object and detection starts with its
    image and class."""
    taken: set[int] = set()
    right = counted = 0
    for image, kind, box, score in sorted(found, key=lambda one: -one[3]):
        if score < 0.5:
            continue
        best, most = -1, (0, 1)
        for number, (where, what, other, _) in enumerate(objects):
            if (where, what) == (image, kind):
                both, either = len(pixels(box) & pixels(other)), len(pixels(box) | pixels(other))
                if both * most[1] > most[0] * either:
                    best, most = number, (both, either)
        if best >= 0 and 100 * most[0] >= percent * most[1]:
            if objects[best][3]:
                continue
            right += best not in taken
            taken.add(best)
        counted += 1
    return right, counted, sum(not hard for *_, hard in objects)


@pytest.mark.parametrize("seed", range(3))
def test_precision_and_recall_of_voc_by_counting_pixels(tmp_path: Path, seed: int) -> None:
    draws = np.random.default_rng(seed)
    classes = ("cat", "dog", "owl")
    objects = [
        (image, int(draws.integers(3)), random_box(draws), bool(draws.random() < 0.2))
        for image in range(8)
        for _ in range(4)
    ]
    found = [(image, kind, nearby(box, draws), float(draws.random())) for image, kind, box, _ in objects * 2]
    found += [(int(draws.integers(8)), int(draws.integers(3)), random_box(draws), float(draws.random())) for _ in "ten"]
    listed = {
        str(image): [
            (classes[kind], int(hard), (box[0] + 1, box[1] + 1, box[2], box[3]))
            for where, kind, box, hard in objects
            if where == image
        ]
        for image in range(8)
    }
    data = read_voc(write_voc(tmp_path, listed))
    metrics = DetectionMetrics([data])
    for image in range(8):
        own = [
            ([float(side) for side in box], 1 + data.classes.index(classes[kind]), score)
            for where, kind, box, score in sorted(found, key=lambda one: -one[3])
            if where == image
        ]
        metrics.add([detections(*own, masks=False)], batch_of(data, [image], start=image))
    figures = metrics.finish(ALONE)
    values = []
    for percent in (50, 60, 70, 80, 90):
        right, counted, total = count_by_loops(objects, found, percent)
        assert figures[f"precision{percent}"] == pytest.approx(right / counted)
        assert figures[f"recall{percent}"] == pytest.approx(right / total)
        values.append(right)
    assert values == sorted(values, reverse=True) and len(set(values)) > 2 and values[0] > 8


def test_without_detections_precision_is_0(tmp_path: Path) -> None:
    data = read_voc(write_voc(tmp_path, {"1": [("cat", 0, (1, 1, 10, 10))]}))
    metrics = DetectionMetrics([data])
    metrics.add([detections(([0.0, 0.0, 10.0, 10.0], 1, 0.4), masks=False)], batch_of(data, [0]))
    figures = metrics.finish(ALONE)
    assert figures[VOC_METRIC] == 1.0 and figures["precision50"] == figures["recall50"] == 0.0, "its score is low"


def test_the_speed_is_of_the_passes_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("trp_scale.finetuning.detection.metrics.time.perf_counter", lambda: float(next(clock)))
    speed = InferenceSpeed()
    for images, expected in ((7, None), (7, None), (4, 4.0), (8, 6.0)):  # a second each
        with speed.measure(torch.zeros(images, 3)):
            pass
        assert speed.images_per_second(ALONE) == expected
    group = TwoRanks("data", rank=1, size=2, others=(3, 1.0))
    assert speed.images_per_second(cast(Group, group)) == 5.0
