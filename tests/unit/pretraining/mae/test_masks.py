"""Filtered noise: its spectrum against that of its filter, the masks it gives, and their independence of the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data.images.stored import config_for, small_images
from tests.unit.data.loaded import assert_same, steps
from trp_scale.config.images import PatchSplit
from trp_scale.data.hashing import mix
from trp_scale.data.images.crops import crop_words
from trp_scale.methods.learned_masks.settings import ColorSettings
from trp_scale.pretraining.mae.batch import color_noise, draw_masks, gaussian, order_by_noise

NOISES = ("red", "blue", "green", "purple")
WORDS = mix(np.arange(400, dtype=np.uint64))
SIDE = 64


def squared_response(noise: str, sigma: float, fine: float) -> np.ndarray:
    """|H(f)|^2 of the filter on a grid of frequencies [SIDE, SIDE]: the transform of a Gaussian is one."""
    frequencies = np.fft.fftfreq(SIDE)
    squares = frequencies[:, None] ** 2 + frequencies[None] ** 2

    def blur(width: float) -> np.ndarray:
        return np.exp(-2 * (np.pi * width) ** 2 * squares)

    band = blur(fine) - blur(sigma)
    return {"red": blur(sigma), "blue": 1 - blur(sigma), "green": band, "purple": 1 - band}[noise] ** 2


@pytest.mark.parametrize("noise", NOISES)
def test_the_mean_power_in_each_band_is_that_of_the_filter(noise: str) -> None:
    """Gaussians wide enough to be their own discrete transform; a Hann window keeps the bands apart."""
    sigma, fine = 2.0, 1.0
    values = color_noise(ColorSettings(noise=noise, sigma=sigma, fine_sigma=fine), WORDS[:200], SIDE) / 2.0**60
    window = np.hanning(SIDE + 1)[:-1]
    window = np.outer(window, window)
    power = np.abs(np.fft.fft2((values - 0.5 * (noise in ("red", "purple"))) * window)) ** 2
    white = (window**2).sum() / 12  # uniform numbers in [0, 1)
    measured, expected = power.mean(0) / white, squared_response(noise, sigma, fine)
    frequencies = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    for low, high in ((0.03, 0.1), (0.1, 0.2), (0.2, 0.3), (0.3, 0.5)):
        band = (frequencies >= low) & (frequencies < high)
        assert measured[band].mean() == pytest.approx(expected[band].mean(), rel=0.1, abs=0.01), (low, high)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 16.0])
def test_a_blur_keeps_the_mean_exactly_and_fits_64_bits(sigma: float) -> None:
    matrix = gaussian(14, sigma, 48)
    assert (matrix.sum(1) == 1 << 20).all() and (matrix >= 0).all()
    top = np.full((14 + 96, 14 + 96), (1 << 20) - 1)
    assert int((matrix @ top @ matrix.T).max()) == ((1 << 20) - 1) << 40


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("patches", [16, 196])
def test_the_masked_patches_are_those_with_the_largest_noise_and_exactly_as_many(noise: str, patches: int) -> None:
    settings, split = ColorSettings(noise=noise), PatchSplit(patches=patches, visible=patches // 4)
    words = crop_words(WORDS[:50], 2)
    visible, masked = draw_masks(words, split, settings)
    assert visible.shape == (50, 2, patches // 4) and masked.shape == (50, 2, patches - patches // 4)
    assert (np.sort(np.concatenate([visible, masked], axis=2), axis=2) == np.arange(patches)).all()
    order = order_by_noise(settings, words, patches)
    side = round(patches**0.5)
    ranked = np.take_along_axis(color_noise(settings, words, side).reshape(50, 2, patches), order, axis=2)
    assert (np.diff(ranked, axis=2) >= 0).all()
    plain, _ = draw_masks(words, split)
    assert (visible != plain).any() and (draw_masks(words, split, None)[0] == plain).all()


def test_red_masks_are_clustered_and_blue_ones_spread() -> None:
    """Share of neighbouring pairs in which both patches are masked or both visible; 5/8 of independent ones."""

    def alike(noise: str) -> float:
        _, masked = draw_masks(crop_words(WORDS, 1), PatchSplit(patches=196, visible=49), ColorSettings(noise=noise))
        flags = np.zeros((len(WORDS), 196), dtype=bool)
        np.put_along_axis(flags, masked[:, 0], True, axis=1)
        grid = flags.reshape(-1, 14, 14)
        return float((grid[:, 1:] == grid[:, :-1]).mean())

    assert alike("red") > 0.75 > 0.6 > alike("blue")


def test_every_patch_is_masked_equally_often() -> None:
    _, masked = draw_masks(
        crop_words(mix(np.arange(4000, dtype=np.uint64)), 1), PatchSplit(patches=16, visible=4), ColorSettings()
    )
    shares = np.bincount(masked.ravel(), minlength=16) / 4000
    assert shares == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 4000) ** 0.5)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_images(tmp_path_factory.mktemp("images") / "data")


def test_the_loader_gives_the_same_masks_however_the_batch_is_split(images: Path) -> None:
    color = {"kind": "color", "noise": "green"}
    whole = steps(config_for(images, multilevel=color), 1, 3)
    apart = steps(config_for(images, multilevel=color, batch={"micro_size": 1}), 2, 3)
    assert_same(apart, whole)
    assert not torch.equal(whole[0]["masked"], steps(config_for(images), 1, 1)[0]["masked"])
