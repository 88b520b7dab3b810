"""COCO files and Pascal VOC folders become the same arrays; what is wrong with them is named."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tests.unit.finetuning.detection.small_sets import coco_document, detection_config, write_coco, write_voc
from trp_scale.config import RefusedError
from trp_scale.data.mixture import MemberPath
from trp_scale.errors import DataError
from trp_scale.finetuning.detection.annotations import (
    BOX,
    MASK,
    OUTSIDE,
    check_images,
    decode,
    encode,
    encode_segmentation,
    read_coco,
    read_voc,
)
from trp_scale.finetuning.detection.task import open_detection, select_learned, training_notices


def member(path: Path) -> MemberPath:
    return MemberPath(name="", weight=Fraction(1), path=path)


def test_coco_categories_with_gaps_are_numbered_by_id_and_objects_follow_their_images(tmp_path: Path) -> None:
    read = read_coco(write_coco(tmp_path, coco_document()))
    assert read.classes == ("plane", "cat", "brush")
    assert read.keys == ["a.png", "b.png"] and read.sizes.tolist() == [[12, 16], [12, 16]]
    assert [list(read.objects(image)) for image in (0, 1)] == [[0, 1, 2], [3]]
    assert read.labels.tolist() == [3, 1, 2, 1]
    assert read.boxes.tolist() == [[4, 2, 10, 8], [1, 1, 4, 4], [4, 2, 10, 8], [0, 2, 2, 5]]
    assert read.ignored.tolist() == [False, True, False, False]
    assert read.counts().tolist() == [2, 1] and read.learned_objects(0) == [0, 2]
    assert read.areas.tolist() == [36, 9, 36, 6]


def test_a_short_mask_that_takes_much_to_draw_is_refused() -> None:
    """By pycocotools 4 KB of polygon ended the process, and a run length of megabytes took hours."""
    far = [[-1e6, -1e6, 1e6, 1e6] * 100]
    with pytest.raises(DataError, match=r"it: .*400000000"):
        encode_segmentation(far, 100, 100, where="it")
    begun = time.process_time()
    with pytest.raises(DataError, match=r"segmentation\.counts"):
        encode_segmentation({"size": [100, 100], "counts": "o" * 1_000_000}, 100, 100, where="it")
    assert time.process_time() - begun < 5
    assert encode_segmentation([[0, 0, 90, 0, 90, 90]], 100, 100, where="it")


def test_polygons_run_lengths_and_compressed_ones_are_the_same_mask(tmp_path: Path) -> None:
    square = np.zeros((12, 16), dtype=np.uint8)
    square[2:8, 4:10] = 1
    document = coco_document()
    lengths = [4 * 12 + 2, *[6, 6] * 6]
    lengths[-1] = 12 * 16 - sum(lengths[:-1])
    forms = ([[4.0, 2.0, 4.0, 8.0, 10.0, 8.0, 10.0, 2.0]], {"size": [12, 16], "counts": lengths},
             {"size": [12, 16], "counts": encode(square).decode()})  # fmt: skip
    for form in forms:
        document["annotations"][0]["segmentation"] = form
        masks = read_coco(write_coco(tmp_path, document)).masks
        assert masks is not None
        assert (decode(masks[0], 12, 16) == square).all()
        other = np.zeros((12, 16), dtype=np.uint8)
        other[2:5, :2] = 1
        assert (decode(masks[3], 12, 16) == other).all()


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40), elements=st.integers(0, 1)))
def test_compressed_runs_are_read_as_they_were_written(mask: np.ndarray) -> None:
    mask[0, 0] = 1
    form = {"size": list(mask.shape), "counts": encode(mask).decode()}
    assert (decode(encode_segmentation(form, *mask.shape, where="it"), *mask.shape) == mask).all()


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(coco_document())
    change(document)
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ([], "no list 'images'"),
        (changed(lambda d: d.pop("categories")), "no list 'categories'"),
        (changed(lambda d: d["annotations"][1].update(image_id=4)), "annotation 2: image_id 4 is not among"),
        (changed(lambda d: d["annotations"][1].update(category_id=6)), "annotation 2: category_id 6 is not among"),
        (changed(lambda d: d["annotations"][1].update(bbox=[1, 2, 3])), r"annotation 2: bbox is \[1, 2, 3\], four"),
        (changed(lambda d: d["annotations"][1].update(bbox=[1, 2, 3, float("nan")])), "annotation 2: bbox is"),
        (changed(lambda d: d["images"][1].update(id=7)), "image id 7 is repeated"),
        (changed(lambda d: d["images"][1].update(height=0)), "image 3: height is 0"),
        (changed(lambda d: d["images"][1].update(file_name="../b.png")), "file_name is '../b.png'"),
        (changed(lambda d: d["images"][1].update(file_name="a.png")), "image 'a.png' is listed twice"),
        (changed(lambda d: d["annotations"][0].update(segmentation={"size": [1, 2], "counts": [2]})), "annotation 1: "),
        (changed(lambda d: d["annotations"][0].update(segmentation={"size": [12, 16], "counts": [2]})), "of 2 pixels"),
        *(
            (changed(lambda d, form=form: d["annotations"][0].update(segmentation=form)), f"annotation 1: .*{message}")
            for form, message in (
                ([[1, 1, float("nan"), 5, 5, 5]], "polygon"),
                ([[1, 1, 1e9, 5, 5, 5]], "polygon"),
                ({"size": [12, 16], "counts": [-5, 197]}, r"segmentation\.counts"),
                ({"size": [12, 16], "counts": [1.5, 190.5]}, r"segmentation\.counts"),
                ({"size": [12, 16], "counts": "é"}, r"segmentation\.counts"),
                ({"size": [12, 16], "counts": "zz"}, r"segmentation\.counts"),
                ({"size": [12, 16], "counts": "0i0"}, "run lengths of 25 pixels, 12 x 16 expected"),
            )
        ),
        (changed(lambda d: d["categories"][0].update(name="cat")), "3 categories"),
    ],
)
def test_a_malformed_coco_file_is_refused_by_place(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_coco(write_coco(tmp_path, document))


def test_empty_and_outside_objects_are_skipped_and_counted(tmp_path: Path) -> None:
    document = coco_document()
    first = document["annotations"][0]
    for box in ([3, 3, 0, 5], [16, 2, 4, 4], [3, -9, 4, 9]):
        document["annotations"].append({**first, "id": 99, "bbox": box})
    document["annotations"].append({**first, "id": 99, "segmentation": [[1, 1, 5, 1]]})
    read = read_coco(write_coco(tmp_path, document))
    assert len(read.boxes) == 4
    assert read.skipped == {BOX: 1, OUTSIDE: 2, MASK: 1}
    assert read.notices() == [
        f"{read.path}: skipped 1 boxes without an area and 2 boxes outside their image and 1 masks without an area"
    ]


def test_missing_images_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = write_coco(tmp_path, coco_document())
    (tmp_path / "images" / "b.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 images .*b\.png"):
        check_images(read_coco(path))
    (tmp_path / "images" / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png"):
        read_coco(path)
    with pytest.raises(DataError, match="2 of 2 images"):
        check_images(read_coco(path, str(tmp_path / "elsewhere")))


def test_the_official_layout_of_coco_is_found(tmp_path: Path) -> None:
    path = write_coco(tmp_path, coco_document())
    (tmp_path / "annotations").mkdir()
    (tmp_path / "images").rename(tmp_path / "val2017")
    moved = path.rename(tmp_path / "annotations" / "instances_val2017.json")
    assert read_coco(moved).folder == tmp_path / "val2017"
    assert open_detection([member(tmp_path / "annotations")], "", masks=False)[0].masks is None


def test_voc_boxes_begin_before_their_first_pixel_and_end_behind_their_last(tmp_path: Path) -> None:
    images = {"000001": [("dog", 0, (1, 1, 30, 20)), ("cat", 1, (3, 4, 5, 6))], "000002": [("dog", 0, (2, 2, 3, 3))]}
    read = read_voc(write_voc(tmp_path, images))
    assert read.voc and read.masks is None and read.classes == ("cat", "dog")
    assert read.boxes.tolist() == [[0, 0, 30, 20], [2, 3, 5, 6], [1, 1, 3, 3]]
    assert read.labels.tolist() == [2, 1, 2] and read.ignored.tolist() == [False, True, False]
    assert read.keys == ["000001.jpg", "000002.jpg"]
    check_images(read)
    assert read_voc(tmp_path).keys == read.keys


def test_malformed_voc_is_refused_by_file(tmp_path: Path) -> None:
    path = write_voc(tmp_path, {"000001": [("dog", 0, (1, 1, 30, 20))]})
    file = tmp_path / "Annotations" / "000001.xml"
    good = file.read_text()
    for bad, message in ((good[:-5], "not XML"), (good.replace("<xmax>30<", "<xmax>?<"), "object 1: bndbox/xmax"),
                         (good.replace("<name>dog</name>", ""), "object 1 has no name")):  # fmt: skip
        file.write_text(bad)
        with pytest.raises(DataError, match=f"000001.xml.*{message}"):
            read_voc(path)
    path.write_text("000001 1\n../000002 -1\n")
    with pytest.raises(DataError, match=r"trainval\.txt: '\.\./000002'"):
        read_voc(path)
    path.write_text("000009\n")
    with pytest.raises(DataError, match=r"000009\.xml"):
        read_voc(path)
    with pytest.raises(DataError, match="Annotations"):
        open_detection([member(tmp_path / "nowhere")], "", masks=False)


def test_classes_are_those_of_training(tmp_path: Path) -> None:
    train = read_voc(write_voc(tmp_path / "a", {"1": [("cat", 0, (1, 1, 5, 5)), ("dog", 0, (1, 1, 9, 9))]}))
    test = read_voc(write_voc(tmp_path / "b", {"1": [("dog", 0, (1, 1, 5, 5))]}))
    assert test.with_classes(train.classes).labels.tolist() == [2]
    with pytest.raises(DataError, match="'cat'"):
        train.with_classes(test.classes)


def test_images_without_objects_are_left_out_of_training_unless_they_are_kept(tmp_path: Path) -> None:
    images = {"1": [("cat", 0, (1, 1, 5, 5))] * 3, "2": [("cat", 1, (1, 1, 5, 5))], "3": []}
    data = [read_voc(write_voc(tmp_path, images))]
    config = detection_config(masks="off", max_objects=2)
    assert select_learned(config, data)[0].tolist() == [True, False, False]
    assert [notice.split(" ")[0] for notice in training_notices(config, data)] == ["1", "2"]
    config.detection.without_objects = "kept"
    assert select_learned(config, data)[0].all()
    with pytest.raises(RefusedError):
        select_learned(config, [read_voc(write_voc(tmp_path / "none", {"1": []}))])
