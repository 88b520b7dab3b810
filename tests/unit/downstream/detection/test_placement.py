"""Images, boxes and masks go the same way into the square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode

from trp_scale.data.hashing import mix
from trp_scale.downstream.detection.batch import Placement, draw_placements, letterbox
from trp_scale.downstream.detection.model import paste

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
        bottom_edge, right_edge = placement.shown
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


def test_sources_undo_boxes() -> None:
    inside = np.array([[3.0, 5.0, 20.0, 11.0], [0.0, 0.0, 8.0, 30.0]])
    for placement in placements(16, (50, 40), scales=(1.5, 2.0)):
        assert np.allclose(placement.boxes(placement.sources(inside)), inside)


def test_a_letterbox_shows_all_of_the_image() -> None:
    one, tall = letterbox(np.array([[30, 60], [100, 10]]), SIDE)
    assert one.shown == (32, 64) and tall.shown == (64, 6)
    assert one.boxes(np.array([[0.0, 0.0, 60.0, 30.0]])).tolist() == [[0, 0, 64, 32]]


def test_placements_are_those_of_the_row_alone() -> None:
    states = mix(np.arange(8, dtype=np.uint64))
    sizes = np.array([[40, 60], [90, 30]] * 4)
    settings = {"scales": (0.1, 2.0), "flip": 0.5}
    together = draw_placements(states, sizes, SIDE, **settings)  # type: ignore[arg-type]
    alone = [draw_placements(states[n : n + 1], sizes[n : n + 1], SIDE, **settings)[0] for n in range(8)]  # type: ignore[arg-type]
    assert together == alone
    assert len({one.flip for one in together}) == 2 and len({one.resized for one in together}) == 8


def test_jitter_covers_its_range_and_windows_all_places() -> None:
    drawn = placements(4000, (64, 64))
    ratios = np.array([one.resized[0] / SIDE for one in drawn])
    assert ratios.min() < 0.43 and ratios.max() > 1.97 and abs(ratios.mean() - 1.2) < 0.03
    assert abs(np.mean([one.flip for one in drawn]) - 0.5) < 0.03
    large = [one for one in drawn if one.resized[0] > 120]
    assert {one.top for one in large} >= set(range(56)) and {one.left for one in large} >= set(range(56))
    assert all(one.top + SIDE <= one.resized[0] for one in large)
    assert all((one.top, one.left) == (0, 0) for one in drawn if one.resized[0] <= SIDE)
