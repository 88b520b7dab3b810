"""Rows of detection: what a batch holds, for which row, whoever makes it; images, boxes and masks go the same way into
the square."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode

from tests.unit.finetuning.detection.small_sets import coco_document, detection_config, small_scenes, write_coco
from trp_scale.core.batch import Batch
from trp_scale.data.hashing import mix
from trp_scale.data.plan import Addresses
from trp_scale.finetuning.detection.annotations import Annotations, decode, read_coco
from trp_scale.finetuning.detection.batch import (
    DetectionBatchBuilder,
    Placement,
    draw_placements,
    letterbox,
    read_image,
)
from trp_scale.finetuning.detection.model import paste
from trp_scale.sharding.images.scenes import render_scene, run_lengths, scene_objects

SIDE = 64


def placements(count: int, size: tuple[int, int], **changes: object) -> list[Placement]:
    states = mix(np.arange(count, dtype=np.uint64))
    settings = {"scales": (0.4, 2.0), "flip": 0.5, **changes}
    return draw_placements(states, np.array([size] * count), SIDE, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(96, 60), (40, 128), (64, 64), (21, 33)])
def test_a_box_lies_around_its_pixels_and_its_mask_on_them(size: tuple[int, int]) -> None:
    height, width = size
    box = np.array([[width * 0.3, height * 0.2, width * 0.7, height * 0.75]]).round()
    left, top, right, bottom = box[0].astype(int)
    mask = np.zeros(size, dtype=np.uint8)
    mask[top:bottom, left:right] = 1
    mask[top : (top + bottom) // 2, left : (left + right) // 2] = 0  # an L, so that a mirrored one is another
    image = torch.from_numpy(mask * 255).expand(3, -1, -1)
    seen = pixels = 0
    differing = dict.fromkeys(((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)), 0)
    for placement in [*placements(24, size), *letterbox(np.array([size]), SIDE)]:
        placed = placement.boxes(box)[0]
        if (placed[2:] - placed[:2]).min() < 4:
            continue
        seen += 1
        square = torch.empty(3, SIDE, SIDE, dtype=torch.uint8)
        placement.image(image, InterpolationMode.BILINEAR, out=square)
        bottom_edge, right_edge = placement.visible
        assert (square[:, bottom_edge:] == 128).all() and (square[:, :, right_edge:] == 128).all()
        there = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        there[:bottom_edge, :right_edge] = square[0, :bottom_edge, :right_edge] >= 128
        if not there.any():
            continue
        lines, columns = np.flatnonzero(there.any(1)), np.flatnonzero(there.any(0))
        # Where the window cuts through the L, its pixels may not reach all sides of the box.
        assert columns[0] >= placed[0] - 1 and columns[-1] + 1 <= placed[2] + 1
        assert lines[0] >= placed[1] - 1 and lines[-1] + 1 <= placed[3] + 1
        if placement.resized[0] <= SIDE and placement.resized[1] <= SIDE:
            found = [columns[0], lines[0], columns[-1] + 1, lines[-1] + 1]
            assert np.abs(placed - found).max() <= 1.0
        stored = placement.mask(mask, placed, 56)[None]
        whole = paste(stored / 255, torch.from_numpy(placed[None]), (SIDE, SIDE))[0] >= 0.5
        for shift in differing:
            differing[shift] += int((torch.roll(whole, shift, (0, 1)) != there).sum())
        pixels += int(there.sum())
    assert seen > 12
    # Sides that fall between two pixels may go either way; moved by one pixel all would be wrong.
    exact = differing.pop((0, 0))
    assert exact < 0.06 * pixels and exact < 0.5 * min(differing.values())


def test_a_letterbox_shows_all_of_the_image() -> None:
    one, tall = letterbox(np.array([[30, 60], [100, 10]]), SIDE)
    assert one.visible == (32, 64) and tall.visible == (64, 6)
    assert one.boxes(np.array([[0.0, 0.0, 60.0, 30.0]])).tolist() == [[0, 0, 64, 32]]


def test_jitter_covers_its_range_and_windows_all_places() -> None:
    drawn = placements(4000, (64, 64))
    ratios = np.array([one.resized[0] / SIDE for one in drawn])
    assert ratios.min() < 0.43 and ratios.max() > 1.97 and abs(ratios.mean() - 1.2) < 0.03
    assert abs(np.mean([one.flip for one in drawn]) - 0.5) < 0.03
    large = [one for one in drawn if one.resized[0] > 120]
    assert {one.top for one in large} >= set(range(56)) and {one.left for one in large} >= set(range(56))
    assert all(one.top + SIDE <= one.resized[0] for one in large)
    assert all((one.top, one.left) == (0, 0) for one in drawn if one.resized[0] <= SIDE)


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
    objects = scenes.learned_objects(4)
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


def test_padding_and_unreadable_rows_are_grey_with_weight_0(tmp_path: Path) -> None:
    data = read_coco(write_coco(tmp_path, coco_document()))
    (tmp_path / "images" / "b.png").write_bytes(b"no image")
    batch = build(data, addresses([0, 1, 0], present=[True, True, False]), augment=True)
    assert batch["row_weights"].tolist() == [1, 0, 0]
    assert batch["counts"].tolist()[1:] == [0, 0] and (batch["images"][1:] == 128).all()
    assert batch.corrupt == [str(tmp_path / "images" / "b.png")]


def test_an_image_of_sixteen_bits_or_of_another_size_is_corrupt(tmp_path: Path) -> None:
    data = read_coco(write_coco(tmp_path, coco_document()))
    for pixels in (np.full((12, 16), 1000, dtype=np.uint16), np.zeros((12, 17), dtype=np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "images" / "b.png")
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


def test_crowds_and_objects_beyond_the_limit_are_skipped(scenes: Annotations, tmp_path: Path) -> None:
    batch = build(read_coco(write_coco(tmp_path, coco_document())), addresses([0]), augment=False)
    assert batch["classes"][0, :3].tolist() == [3, 2, 0]
    most = int(np.argmax(scenes.counts()))
    assert scenes.counts()[most] > 1
    assert build(scenes, addresses([most]), augment=False, max_objects=1)["counts"].tolist() == [1]


def test_invisible_objects_are_not_learned(tmp_path: Path) -> None:
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
