"""Large-scale jitter: its sizes, that a map stays on its image, and that a row's draw is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trp_scale.config import CropsConfig
from trp_scale.data.images.jitter import Jitter, Jitters
from trp_scale.modalities.semseg import VOID

SIZE = 64
BLOCK = 50
"""Pixels of a block of one class: much more than the resampling mixes."""

PADDING = 128


def jitter(flip: float = 0.5, min_scale: float = 0.1, max_scale: float = 2.0, longer: bool = True) -> Jitter:
    return Jitter(CropsConfig(size=SIZE, flip=flip), (min_scale, max_scale), longer=longer)


def states(count: int, epoch: int = 0) -> np.ndarray:
    return np.arange(count, dtype=np.uint64) * np.uint64(7919) + np.uint64(epoch << 40)


def blocks(height: int, width: int) -> tuple[torch.Tensor, np.ndarray]:
    """An image whose colour says the class, 30 x (1 + class), and its map; no two neighbouring blocks are alike."""
    lines, columns = np.arange(height)[:, None] // BLOCK, np.arange(width)[None, :] // BLOCK
    classes = ((3 * lines + columns + lines * columns) % 7).astype(np.uint8)
    return torch.from_numpy(30 * (1 + classes)).expand(3, -1, -1).contiguous(), classes


def carried_out(drawn: Jitters, by: Jitter, row: int, image: torch.Tensor, classes: np.ndarray):  # type: ignore[no-untyped-def]
    out = torch.full((3, SIZE, SIZE), PADDING, dtype=torch.uint8)
    picked = np.full((SIZE, SIZE), VOID, dtype=np.uint8)
    by.cut(image, drawn, row, out)
    by.pick(classes, drawn, row, picked)
    return out, picked


@pytest.mark.parametrize(("height", "width"), [(150, 150), (120, 200), (240, 110)])
def test_the_map_stays_on_its_image(height: int, width: int) -> None:
    image, classes = blocks(height, width)
    by = jitter(min_scale=0.6)
    drawn = by.draw(states(16), np.tile([height, width], (16, 1)))
    assert drawn.flips.any() and not drawn.flips.all()
    for row in range(16):
        out, picked = carried_out(drawn, by, row, image, classes)
        shown = picked != VOID
        tall, wide = drawn.shown[row]
        assert shown.sum() == tall * wide
        seen = np.rint(out[0].numpy() / 30) - 1
        assert (seen[shown] == picked[shown]).mean() > 0.8, "away from the edges of blocks both say the same class"
        assert (out.numpy()[:, ~shown] == PADDING).all()
        if drawn.flips[row]:
            assert shown[:, -1].any(), "the padding is mirrored with the image"
        else:
            assert shown[0, 0]


def test_the_scale_is_that_of_the_side_that_is_named() -> None:
    sizes = np.array([[100, 200]] * 64)
    half = jitter(min_scale=0.5, max_scale=0.5).draw(states(64), sizes)
    assert (half.shown == [SIZE // 4, SIZE // 2]).all() and (half.boxes == [0, 0, 100, 200]).all()
    half = jitter(min_scale=0.5, max_scale=0.5, longer=False).draw(states(64), sizes)
    assert (half.shown == [SIZE // 2, SIZE]).all() and (half.boxes == [0, 0, 100, 200]).all()
    double = jitter(min_scale=2.0, max_scale=2.0).draw(states(64), sizes)
    assert (double.shown == SIZE).all() and (double.boxes[:, 2:] == 100).all(), "twice as large: half of it is seen"
    assert double.boxes[:, 1].min() < 20 and double.boxes[:, 1].max() > 80, "the place is random"


def test_scales_are_spread_over_the_range() -> None:
    shown = jitter(min_scale=0.1, max_scale=1.0).draw(states(2000), np.full((2000, 2), 300)).shown[:, 0] / SIZE
    assert shown.min() < 0.12 and shown.max() > 0.98
    assert np.quantile(shown, 0.5) == pytest.approx(0.55, abs=0.03)


def test_nothing_is_ever_outside_the_image() -> None:
    sizes = np.random.default_rng(0).integers(1, 400, (500, 2))
    drawn = jitter(min_scale=0.1, max_scale=5.0).draw(states(500), sizes)
    assert (drawn.boxes >= 0).all() and (drawn.boxes[:, 2:] >= 1).all() and (drawn.shown >= 1).all()
    assert (drawn.boxes[:, :2] + drawn.boxes[:, 2:] <= sizes).all() and (drawn.shown <= SIZE).all()


def test_a_window_lies_anywhere_in_both_directions() -> None:
    drawn = jitter(min_scale=2.0, max_scale=2.0).draw(states(2000), np.full((2000, 2), 128)).boxes
    assert drawn[:, 2:].max() == 64 and drawn[:, :2].min() == 0 and drawn[:, :2].max() == 64
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 4 / 2000**0.5


def test_a_row_draws_the_same_in_any_batch_and_another_in_another_epoch() -> None:
    by, sizes = jitter(), np.full((8, 2), 128)
    together, alone = by.draw(states(8), sizes), by.draw(states(8)[5:6], sizes[5:6])
    assert (together.boxes[5] == alone.boxes[0]).all() and (together.shown[5] == alone.shown[0]).all()
    assert together.flips[5] == alone.flips[0]
    later = by.draw(states(8, epoch=1), sizes)
    changed = (later.boxes != together.boxes).any(axis=1) | (later.shown != together.shown).any(axis=1)
    assert changed.all()
