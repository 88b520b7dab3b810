"""Photometric distortion against colorsys, and its draws."""

from __future__ import annotations

import colorsys
import itertools

import numpy as np
import pytest
import torch

from trp_scale.data.hashing import mix
from trp_scale.data.images.distortion import distort, draw_distortions

STATES = mix(np.arange(4000, dtype=np.uint64))


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
    draws = draw_distortions(STATES)
    changed = draws != (0.0, 1.0, 1.0, 0.0, 0.0)
    assert np.abs(changed.mean(0) - (0.5, 0.5, 0.5, 0.5 * 35 / 36, 0.5)).max() < 0.03
    assert np.abs(np.corrcoef(changed.T) - np.eye(5)).max() < 0.06, "drawn independently"
    for column, (low, high) in enumerate(((-32, 32), (0.5, 1.5), (0.5, 1.5))):
        values = np.sort(draws[changed[:, column], column])
        expected = low + (high - low) * (np.arange(len(values)) + 0.5) / len(values)
        assert np.abs(values - expected).max() < 0.05 * (high - low), "uniform"
    assert set(draws[:, 3]) == set(range(-18, 18))


def test_a_row_draws_the_same_in_any_batch() -> None:
    assert np.array_equal(draw_distortions(STATES)[7], draw_distortions(STATES[7:8])[0])
