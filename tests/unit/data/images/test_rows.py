"""JPEGs decoded at a part of their size: which part, what pixels, that maps stay on their images, and that nothing else
depends on it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

from tests.unit.data.images.stored import config_for, jpeg, photograph, sample, steps, write_images
from tests.unit.data.loaded import assert_same
from trp_scale.config import Config, CropsConfig
from trp_scale.config.loader import load_recipe
from trp_scale.data.images.crops import Cropper, on_scaled_pixels
from trp_scale.data.images.rows import decode_image, decode_scaled, jpeg_size
from trp_scale.errors import DataError

ON = {"scaled_decoding": True}


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(10 * torch.log10(255**2 / (one.double() - other.double()).square().mean()))


def stored(image: Image.Image, **options: object) -> bytearray:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95, **options)
    return bytearray(stream.getvalue())


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_scaled_pixel_is_the_mean_of_those_that_it_stands_for(scale: int, options: dict[str, object]) -> None:
    content = stored(photograph(161, 243), **options)
    found, whole = decode_scaled(content, scale), decode_image(content)
    assert found.dtype == torch.uint8 and tuple(found.shape) == (3, -(-161 // scale), -(-243 // scale))
    means = avg_pool2d(whole.float(), scale)  # of whole squares alone
    assert psnr(found[:, : means.shape[1], : means.shape[2]], means) > 40


def test_grey_images_have_three_equal_channels() -> None:
    found = decode_scaled(stored(photograph(64, 96).convert("L")), 2)
    assert tuple(found.shape) == (3, 32, 48) and torch.equal(found[0], found[2])


def test_what_has_no_smaller_size_is_decoded_whole() -> None:
    assert jpeg_size(stored(photograph(33, 70))) == (33, 70)
    for content in (
        stored(photograph(64, 64).convert("CMYK")),
        bytearray(),
        bytearray(b"no JPEG"),
        stored(photograph(64, 64))[:9],
    ):
        assert jpeg_size(content) == (1, 1)
    with pytest.raises(DataError, match="JPEG"):
        decode_scaled(stored(photograph(64, 64))[:-300], 2)


def test_the_scale_is_the_largest_that_leaves_every_crop_its_size() -> None:
    random = np.random.default_rng(0)
    boxes = random.integers(1, 1200, (500, 3, 4))
    boxes[:, :, 2:] = random.integers(100, 1500, (500, 3, 2))
    snapped, scales = on_scaled_pixels(boxes, 112)
    assert set(scales.tolist()) == {1, 2, 4, 8}
    for box, new, scale in zip(boxes, snapped, scales.tolist(), strict=True):
        smallest = int(box[:, 2:].min())
        assert scale == max(each for each in (1, 2, 4, 8) if each == 1 or smallest // each >= 112)
        assert (new % scale == 0).all() and (new[:, 2:] // scale >= min(112, smallest)).all()
        assert (box - new >= 0).all() and (box - new < scale).all()
        assert (new[:, :2] + new[:, 2:] <= box[:, :2] + box[:, 2:]).all(), "no box leaves its image"


@pytest.mark.parametrize("view", [False, True])
def test_crops_are_those_of_the_whole_image(view: bool) -> None:
    """The same boxes, cut out of all pixels."""
    content = stored(photograph(700, 900))
    settings = CropsConfig(size=64, min_scale=0.5, from_="view" if view else "image", view_size=96, **ON)
    cropper = Cropper(settings)
    for row in range(5):
        words, sizes = np.array([row], dtype=np.uint64), np.array([[700, 900]])
        crops = cropper.draw(words, sizes)
        assert crops.scales[0] >= 4
        found, exact = (torch.empty(1, 3, 64, 64, dtype=torch.uint8) for _ in range(2))
        cropper.cut(decode_scaled(content, int(crops.scales[0])), crops, 0, found)
        crops.scales[0] = 1
        cropper.cut(decode_image(content), crops, 0, exact)
        assert psnr(found, exact) > 40


def images(directory: Path) -> Path:
    sizes = [(300, 420), (40, 90), (600, 130), (31, 31), (420, 300), (2, 500)]
    samples = [sample(number, *sizes[number % 6]) for number in range(24)]
    samples[7] = sample(7, 1, 1, jpg=jpeg(photograph(300, 300))[:4000])
    samples[8] = sample(8, 1, 1, jpg=jpeg(photograph(300, 300))[:9])
    return write_images(directory / "data", [samples[:10], samples[10:]])


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (1, 1)])
def test_ranks_and_workers_change_nothing_and_damage_is_named(tmp_path: Path, world: int, workers: int) -> None:
    data = images(tmp_path)
    reference = steps(config_for(data, crops=ON), 1, 3)
    assert_same(
        steps(config_for(data, crops=ON, data={"workers": workers}, batch={"micro_size": 2}), world, 3), reference
    )
    whole = steps(config_for(data), 1, 3)
    differing = 0
    for one, other in zip(reference, whole, strict=True):
        for name in ("keys", "labels", "row_weights", "visible", "masked"):
            assert torch.equal(one[name], other[name]), name
        differing += int((one["images"] != other["images"]).flatten(1).any(1).sum())
        assert (one["row_weights"] == 0).sum() == sum((row == 128).all() for row in one["images"])
    assert 6 < differing < 30, "large images alone"


def test_small_images_are_the_same_to_the_bit(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[sample(number, 60, 63) for number in range(12)]])
    assert_same(steps(config_for(data, crops=ON), 1, 2), steps(config_for(data), 1, 2))


def test_a_task_that_reads_whole_images_refuses_it() -> None:
    for recipe in ("segmentation_tiny", "depth_tiny", "detection_tiny"):
        config: Config = load_recipe(recipe)
        config.crops.scaled_decoding = True  # type: ignore[attr-defined]
        assert any("--crops.scaled_decoding" in problem for problem in config.problems())
    config = load_recipe("classification_tiny")
    config.crops.scaled_decoding = True  # type: ignore[attr-defined]
    assert not any("scaled_decoding" in problem for problem in config.problems())
