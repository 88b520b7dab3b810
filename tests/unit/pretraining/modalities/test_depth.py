"""Standardised depth against a plain sort in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trp_scale.pretraining.modalities.depth import crop_statistics, standardise


def plain(depth: np.ndarray, unit: float) -> np.ndarray:
    """By the definition: sort, drop a tenth at both ends, mean and variance of the rest."""
    metres = depth.astype(np.float64) * unit
    measured = np.sort(metres[depth > 0])
    tenth = len(measured) // 10
    rest = measured[tenth : len(measured) - tenth]
    result = (metres - rest.mean()) / np.sqrt(rest.var() + 1e-6)
    return np.where(depth > 0, result, np.nan)


def of_crop(depth: np.ndarray, scale: float | None) -> np.ndarray:
    """Of one crop, as on a device."""
    statistics = torch.tensor([crop_statistics(depth, scale)], dtype=torch.float32)
    return standardise(torch.from_numpy(depth)[None], statistics)[0].numpy()


def drawn(kind: str) -> np.ndarray:
    random = np.random.default_rng(5)
    if kind == "everywhere":
        return random.integers(1, 1 << 16, (64, 64)).astype(np.uint16)
    if kind == "holes":
        return (random.integers(600, 5000, (48, 48)) * (random.random((48, 48)) < 0.6)).astype(np.uint16)
    if kind == "ties":  # the ends of the middle lie among many equal pixels
        return random.choice([1000, 1001, 3000], (40, 40), p=[0.15, 0.7, 0.15]).astype(np.uint16)
    if kind == "flat far away":  # a wall at 60 m, its unevenness of the order of the unit
        return random.integers(60_000, 60_003, (40, 40)).astype(np.uint16)
    few = np.zeros((16, 16), dtype=np.uint16)
    few.ravel()[random.permutation(256)[:19]] = random.integers(1, 9000, 19)  # a tenth of 19 is 1
    return few


@pytest.mark.parametrize("scale", [None, 0.001, 1.0])
@pytest.mark.parametrize("kind", ["everywhere", "holes", "ties", "flat far away", "few"])
def test_standardised_depth_equals_a_plain_sort(kind: str, scale: float | None) -> None:
    depth = drawn(kind)
    found = of_crop(depth, scale)
    assert found.dtype == np.float32 and (np.isnan(found) == (depth == 0)).all()
    np.testing.assert_allclose(found, plain(depth, scale or 1 / 65535), rtol=3e-7, atol=3e-7)


def test_constant_crop_is_zero_and_unmeasured_crop_is_nan() -> None:
    assert (of_crop(np.full((8, 8), 777, dtype=np.uint16), None) == 0).all()
    one = np.zeros((8, 8), dtype=np.uint16)
    assert np.isnan(of_crop(one, 0.001)).all()
    one[2, 3] = 65_535
    assert of_crop(one, 0.001)[2, 3] == 0 and np.isnan(of_crop(one, 0.001)).sum() == 63
