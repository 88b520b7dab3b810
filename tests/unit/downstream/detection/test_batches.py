"""Rows of detection: what a batch holds, for which row, whoever makes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from tests.unit.downstream.detection.small_sets import coco_document, detection_config, small_scenes, write_coco
from trp_scale.core.batch import Batch
from trp_scale.data.plan import Addresses
from trp_scale.downstream.detection.annotations import Annotations
from trp_scale.downstream.detection.batch import DetectionBatchBuilder, read_image
from trp_scale.downstream.detection.files import read_coco
from trp_scale.downstream.detection.masks import decode
from trp_scale.downstream.detection.model import paste
from trp_scale.preparation.images.scenes import render_scene, run_lengths, scene_objects


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Annotations:
    return read_coco(small_scenes(tmp_path_factory.mktemp("scenes") / "data") / "annotations.json")


def addresses(images: list[int], epoch: int = 0, present: list[bool] | None = None) -> Addresses:
    blocks = np.array(images, dtype=np.int64)
    zeros = np.zeros_like(blocks)
    there = np.ones(len(images), dtype=np.bool_) if present is None else np.array(present)
    return Addresses(member=zeros, block=blocks, row=zeros, epoch=zeros + epoch, keys=blocks * 7919, present=there)


def build(data: Annotations, where: Addresses, *, augment: bool, **settings: int) -> Batch:
    return DetectionBatchBuilder(detection_config(96, **settings), [data], augment=augment).build(where, 5)


def test_a_row_does_not_depend_on_its_batch_and_changes_with_the_epoch(scenes: Annotations) -> None:
    settings = {"min_scale": 0.5, "max_scale": 1.5}
    together = build(scenes, addresses([3, 8, 1]), augment=True, **settings)  # type: ignore[arg-type]
    alone = build(scenes, addresses([8]), augment=True, **settings)  # type: ignore[arg-type]
    later = build(scenes, addresses([8], epoch=1), augment=True, **settings)  # type: ignore[arg-type]
    assert all(torch.equal(together[name][1:2], alone[name]) for name in together.fields)
    assert not torch.equal(later["images"], alone["images"])


def test_measured_images_are_whole_with_all_their_objects(scenes: Annotations) -> None:
    batch = build(scenes, addresses([4]), augment=False)
    objects = scenes.counted(4)
    assert batch["counts"].tolist() == [len(objects)]
    assert torch.allclose(batch["boxes"][0, : len(objects)].double(), torch.from_numpy(scenes.boxes[objects]) * 2)
    assert batch["classes"][0, : len(objects)].tolist() == scenes.labels[objects].tolist()
    assert not batch["boxes"][0, len(objects) :].any()
    assert batch["sizes"].tolist() == [[48, 48]] and batch["resized"].tolist() == [[96, 96]]
    assert batch["image"].tolist() == [[0, 4]]
    whole = paste(batch["masks"][0, : len(objects)] / 255, batch["boxes"][0, : len(objects)], (96, 96)) >= 0.5
    assert scenes.masks is not None
    for number, mask in zip(objects, whole, strict=True):
        exact = torch.from_numpy(decode(scenes.masks[number], 48, 48)).repeat_interleave(2, 0).repeat_interleave(2, 1)
        both, either = (mask & exact).sum(), (mask | exact).sum()
        assert both / either > 0.85, number


def test_rows_that_are_not_there_or_cannot_be_read_are_grey_and_have_no_weight(tmp_path: Path) -> None:
    data = read_coco(write_coco(tmp_path, coco_document()))
    (tmp_path / "images" / "b.png").write_bytes(b"no image")
    batch = build(data, addresses([0, 1, 0], present=[True, True, False]), augment=True)
    assert batch["row_weights"].tolist() == [1, 0, 0]
    assert batch["counts"].tolist()[1:] == [0, 0] and (batch["images"][1:] == 128).all()
    assert batch.corrupt == [str(tmp_path / "images" / "b.png")]


def test_an_image_of_sixteen_bits_is_corrupt(tmp_path: Path) -> None:
    """Its numbers would be taken modulo 256."""
    data = read_coco(write_coco(tmp_path, coco_document()))
    Image.fromarray(np.full((12, 16), 1000, dtype=np.uint16)).save(tmp_path / "images" / "b.png")
    assert build(data, addresses([0, 1]), augment=False)["row_weights"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        *((mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *((mode, "JPEG") for mode in ("L", "RGB", "CMYK")),
        ("P", "GIF"),
        ("RGB", "WEBP"),
    ],
)
def test_images_are_read_as_torchvision_reads_them(tmp_path: Path, mode: str, form: str) -> None:
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 4), dtype=np.uint8), "RGBA")
    (colours.convert("RGB") if mode == "P" else colours).convert(mode).save(tmp_path / "image", form)
    content = torch.from_numpy(np.fromfile(tmp_path / "image", dtype=np.uint8))
    expected = decode_image(content, mode=ImageReadMode.RGB)
    assert torch.equal(read_image(tmp_path / "image", (12, 16)), expected)


def test_an_image_of_another_size_than_its_annotations_say_is_corrupt(tmp_path: Path) -> None:
    document = coco_document()
    document["images"][0]["width"] = 17
    for one in document["annotations"]:
        one.pop("segmentation")
    batch = build(read_coco(write_coco(tmp_path, document)), addresses([0, 1]), augment=False, masks="off")  # type: ignore[arg-type]
    assert batch["row_weights"].tolist() == [0, 1] and "masks" not in batch.fields


def test_crowds_are_not_learned_and_the_most_objects_are_kept_to(scenes: Annotations, tmp_path: Path) -> None:
    batch = build(read_coco(write_coco(tmp_path, coco_document())), addresses([0]), augment=False)
    assert batch["classes"][0, :3].tolist() == [3, 2, 0]
    most = int(np.argmax(scenes.counts()))
    assert scenes.counts()[most] > 1
    assert build(scenes, addresses([most]), augment=False, max_objects=1)["counts"].tolist() == [1]


def test_objects_of_which_nothing_is_left_to_see_are_not_learned(tmp_path: Path) -> None:
    document = coco_document()
    first = document["annotations"][0]
    thin = {**first, "bbox": [2, 2, 1.5, 8], "segmentation": [[2, 2, 2, 10, 3.5, 10, 3.5, 2]]}
    document["annotations"] = [thin, first]
    data = read_coco(write_coco(tmp_path, document))
    for side, learned in ((64, [2]), (8, [1])):  # in squares of 8 it is less than a pixel wide
        builder = DetectionBatchBuilder(detection_config(side), [data], augment=False)
        assert builder.build(addresses([0]), 0)["counts"].tolist() == learned
    beside = {**first, "segmentation": {"size": [12, 16], "counts": [0, 1, 191]}}  # no pixel of the mask is in its box
    document["annotations"] = [beside, first]
    data = read_coco(write_coco(tmp_path, document))
    assert build(data, addresses([0]), augment=False)["counts"].tolist() == [1]


def test_boxes_of_scenes_are_the_bounds_of_their_masks() -> None:
    scene = render_scene(0, 3, 64)
    objects = scene_objects(scene)
    assert objects
    for one in objects:
        lengths = one["segmentation"]["counts"]
        values = np.repeat(np.arange(len(lengths)) % 2, lengths).reshape(64, 64, order="F")
        assert values.sum() == one["area"]
        left, top, width, height = one["bbox"]
        assert values[top : top + height, left : left + width].sum() == one["area"]
        edges = (values[top], values[top + height - 1], values[:, left], values[:, left + width - 1])
        assert all(edge.any() for edge in edges)


@pytest.mark.parametrize("first", [False, True])
def test_run_lengths_begin_with_zeros(first: bool) -> None:
    mask = np.array([[first, False, True], [True, True, False]])
    lengths = run_lengths(mask)
    assert np.repeat(np.arange(len(lengths)) % 2, lengths).tolist() == mask.ravel(order="F").astype(int).tolist()
