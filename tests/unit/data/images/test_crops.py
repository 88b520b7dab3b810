"""Crops: distributions against torchvision's own, pixels against Pillow, draws that depend on nothing but the row. And
large-scale jitter: its sizes, that a map stays on its image, and that a row's draw is its own."""

from __future__ import annotations

import colorsys
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from tests.grids import always
from tests.unit.data.images.stored import photograph
from trp_scale.config.images import CropsConfig
from trp_scale.data.hashing import mix
from trp_scale.data.images.crops import (
    Cropper,
    Crops,
    Jitter,
    Jitters,
    crop_words,
    distort,
    draw_boxes,
    draw_distortions,
)
from trp_scale.pretraining.modalities.semseg import VOID

STATES = mix(np.arange(20_000, dtype=np.uint64))


def sizes_of(height: int, width: int, rows: int = len(STATES)) -> np.ndarray:
    return np.tile(np.array([height, width]), (rows, 1))


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both round between the two directions of resampling, each in its own way."""
    difference = (ours.int() - theirs.int()).abs()
    assert difference.max() <= 2 and difference.float().mean() < 0.1


def quantiles_of(values: np.ndarray) -> np.ndarray:
    return np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])


@pytest.mark.parametrize(("height", "width"), always([(375, 500), (500, 150)], (500, 150)))
def test_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    """Places, areas and ratios of 20,000 boxes each; the second size falls back in part to later tries."""
    boxes = draw_boxes(crop_words(STATES, 1), sizes_of(height, width), 0.2, 1.0)[:, 0]
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(20_000)])
    for name, values in {
        "top": lambda box: box[:, 0] / height,
        "left": lambda box: box[:, 1] / width,
        "height": lambda box: box[:, 2] / height,
        "width": lambda box: box[:, 3] / width,
        "area": lambda box: box[:, 2] * box[:, 3] / (height * width),
        "ratio": lambda box: box[:, 3] / box[:, 2] - 1,
    }.items():
        np.testing.assert_allclose(quantiles_of(values(boxes)), quantiles_of(values(theirs)), atol=0.015, err_msg=name)


def test_boxes_lie_inside_and_keep_the_limits() -> None:
    heights = 1 + STATES[:, None] % np.uint64(40)
    widths = 1 + (STATES[:, None] >> np.uint64(32)) % np.uint64(300)
    sizes = np.concatenate([heights, widths], axis=1).astype(np.int64)
    top, left, height, width = np.moveaxis(draw_boxes(crop_words(STATES, 3), sizes, 0.2, 1.0), 2, 0)  # [R, 3]
    assert (height >= 1).all() and (width >= 1).all() and (top >= 0).all() and (left >= 0).all()
    assert (top + height <= sizes[:, :1]).all() and (left + width <= sizes[:, 1:]).all()
    for first, length, limit in ((top, height, sizes[:, :1]), (left, width, sizes[:, 1:])):
        two_places = length == limit - 1
        assert two_places.sum() > 500 and 0.4 < first[two_places].mean() < 0.6  # the last place is taken too


@pytest.mark.parametrize(
    ("size", "box"),
    [((10, 400), (0, 193, 10, 13)), ((400, 10), (193, 0, 13, 10)), ((1, 1), (0, 0, 1, 1)), ((1, 3), (0, 1, 1, 1))],
)
def test_where_no_try_fits_the_largest_central_box_is_taken(size: tuple[int, int], box: tuple[int, ...]) -> None:
    """At a scale of 1 a box as long as the image is wide never fits; torchvision does the same."""
    boxes = draw_boxes(crop_words(STATES[:50], 1), sizes_of(*size, rows=50), 1.0, 1.0)
    theirs = RandomResizedCrop.get_params(torch.empty(3, *size), [1.0, 1.0], [3 / 4, 4 / 3])
    assert (boxes == np.array(box)).all() and tuple(theirs) == box


def test_crops_are_independent_of_each_other_and_of_the_batch() -> None:
    words = crop_words(STATES, 2)
    boxes = draw_boxes(words, sizes_of(300, 400), 0.2, 1.0).astype(np.float64)  # [R, 2, 4]
    for side in range(4):
        assert abs(np.corrcoef(boxes[:, 0, side], boxes[:, 1, side])[0, 1]) < 0.03
    few = draw_boxes(crop_words(STATES[7:9], 4), sizes_of(300, 400, rows=2), 0.2, 1.0)
    assert (few[:, :2] == boxes[7:9]).all()  # nor on how many crops there are


@pytest.mark.parametrize(("flip", "low", "high"), [(0.0, 0.0, 0.0), (0.5, 0.48, 0.52), (1.0, 1.0, 1.0)])
def test_flips(flip: float, low: float, high: float) -> None:
    crops = Cropper(CropsConfig(count=2, flip=flip)).draw(STATES, sizes_of(300, 400))
    assert low <= crops.flips.mean() <= high
    if 0 < flip < 1:
        assert abs(np.corrcoef(crops.flips[:, 0], crops.flips[:, 1])[0, 1]) < 0.03
        assert abs(np.corrcoef(crops.flips[:, 0], crops.boxes[:, 0, 1])[0, 1]) < 0.03


def test_windows_are_uniform_over_the_view() -> None:
    cropper = Cropper(CropsConfig(count=3, size=112, view_size=115, from_="view"))
    crops = cropper.draw(STATES, sizes_of(300, 400))
    assert crops.windows is not None and crops.boxes.shape == (20_000, 1, 4) and crops.windows.shape == (20_000, 3, 2)
    for number in range(3):
        cells = np.bincount(crops.windows[:, number, 0] * 4 + crops.windows[:, number, 1], minlength=16)
        assert len(cells) == 16 and np.abs(cells / 20_000 - 1 / 16).max() < 0.008
    assert abs(np.corrcoef(crops.windows[:, 0, 0], crops.windows[:, 1, 0])[0, 1]) < 0.03
    whole = Cropper(CropsConfig(count=2, size=64, view_size=64, from_="view")).draw(STATES[:9], sizes_of(90, 80, 9))
    assert whole.windows is not None and (whole.windows == 0).all()


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [20, 70], ids=["smaller", "larger"])
def test_pixels_are_those_of_pillow(interpolation: str, size: int) -> None:
    """Pillow resamples with antialiasing, and keeps to the box when it is cropped first."""
    image = photograph(50, 61, seed=3)
    cropper = Cropper(CropsConfig(count=2, size=size, interpolation=interpolation))  # type: ignore[arg-type]
    boxes = np.array([[[3, 5, 31, 40], [0, 0, 50, 61]]])
    crops = Crops(boxes=boxes, windows=None, flips=np.array([[False, True]]), scales=np.array([1]))
    out = torch.empty(2, 3, size, size, dtype=torch.uint8)
    cropper.cut(as_tensor(image), crops, 0, out)
    method = Image.Resampling[interpolation.upper()]
    plain = as_tensor(image.crop((5, 3, 45, 34)).resize((size, size), method))
    mirrored = as_tensor(image.resize((size, size), method).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert_near(out[0], plain)
    assert_near(out[1], mirrored)


def test_windows_are_cut_from_the_view() -> None:
    image = photograph(50, 61, seed=4)
    cropper = Cropper(CropsConfig(count=2, size=10, view_size=24, from_="view"))
    boxes, windows = np.array([[[3, 5, 31, 40]]]), np.array([[[2, 9], [14, 0]]])
    out = torch.empty(2, 3, 10, 10, dtype=torch.uint8)
    crops = Crops(boxes=boxes, windows=windows, flips=np.array([[True, False]]), scales=np.array([1]))
    cropper.cut(as_tensor(image), crops, 0, out)
    view = as_tensor(image.crop((5, 3, 45, 34)).resize((24, 24), Image.Resampling.BICUBIC))
    assert_near(out[0], view[:, 2:12, 9:19].flip(-1))
    assert_near(out[1], view[:, 14:24, 0:10])


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


def pixel_of(pixel: tuple[int, ...], distortion: np.ndarray) -> list[float]:
    """MMSegmentation's order by the standard library: brightness, contrast or not, saturation, hue, contrast."""
    brightness, contrast, saturation, hue, last = distortion.tolist()
    values = [min(255.0, max(0.0, value + brightness)) for value in pixel]
    if not last:
        values = [min(255.0, value * contrast) for value in values]
    h, s, v = colorsys.rgb_to_hsv(*(value / 255 for value in values))
    values = [255 * value for value in colorsys.hsv_to_rgb((h + 2 * hue / 360) % 1, min(1.0, s * saturation), v)]
    if last:
        values = [min(255.0, value * contrast) for value in values]
    return values


@pytest.mark.parametrize("row", range(40))
def test_pixels_are_those_of_colorsys(row: int) -> None:
    colours = list(itertools.product((0, 3, 100, 128, 251, 255), repeat=3))
    image = torch.tensor(colours, dtype=torch.uint8).T.reshape(3, 12, 18)
    distortion = draw_distortions(STATES[:40])[row]
    expected = torch.tensor([pixel_of(colour, distortion) for colour in colours], dtype=torch.float64).T.reshape(
        3, 12, 18
    )
    found = distort(image, distortion)
    assert (found - expected).abs().max() <= 0.5 + 1e-3, "rounded to the nearest byte"


def test_draws_are_mmsegmentation_s() -> None:
    draws = draw_distortions(STATES[:4000])
    changed = draws != (0.0, 1.0, 1.0, 0.0, 0.0)
    assert np.abs(changed.mean(0) - (0.5, 0.5, 0.5, 0.5 * 35 / 36, 0.5)).max() < 0.03
    assert np.abs(np.corrcoef(changed.T) - np.eye(5)).max() < 0.06, "drawn independently"
    for column, (low, high) in enumerate(((-32, 32), (0.5, 1.5), (0.5, 1.5))):
        values = np.sort(draws[changed[:, column], column])
        expected = low + (high - low) * (np.arange(len(values)) + 0.5) / len(values)
        assert np.abs(values - expected).max() < 0.05 * (high - low), "uniform"
    assert set(draws[:, 3]) == set(range(-18, 18))


def test_a_row_draws_the_same_in_any_batch() -> None:
    assert np.array_equal(draw_distortions(STATES[:40])[7], draw_distortions(STATES[7:8])[0])
