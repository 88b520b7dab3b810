"""Errors of depth by their definitions, pixel by pixel in float64; what counts nowhere; alignment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import ALONE
from trp_scale.finetuning.dense.depth import DepthErrors, DepthSpace, region_mask

METRES = DepthSpace(inverse=False, mean=3.0, deviation=1.0, low=1e-3, high=10.0)
INVERSE = DepthSpace(inverse=True, mean=0.5, deviation=1.0, low=1e-3, high=10.0)


def batch_of(maps: torch.Tensor, there: int | None = None) -> Batch:
    rows, height, width = maps.shape
    weights = torch.ones(rows)
    if there is not None:
        weights[there:] = 0
    fields = {"whole_depth": maps, "sizes": torch.tensor([[height, width]] * rows), "row_weights": weights}
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def random_depth(*shape: int, seed: int = 0, low: float = 0.5, high: float = 9.0) -> torch.Tensor:
    return torch.empty(*shape).uniform_(low, high, generator=torch.Generator().manual_seed(seed))


def compute_errors(
    predicted: torch.Tensor, true: torch.Tensor, space: DepthSpace = METRES, **settings: Any
) -> dict[str, Any]:
    metric = DepthErrors(space, **settings)
    metric.add(list(predicted), batch_of(true))
    return metric.finish(ALONE)


def by_definition(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """One pixel after the other."""
    pairs = [(float(p), float(t)) for p, t in zip(predicted.ravel(), true.ravel(), strict=True) if t > 0]
    count = len(pairs)
    found = {f"delta_{k}": sum(max(p / t, t / p) < 1.25**k for p, t in pairs) / count for k in (1, 2, 3)}
    return found | {
        "rmse": math.sqrt(sum((p - t) ** 2 for p, t in pairs) / count),
        "rel": sum(abs(p - t) / t for p, t in pairs) / count,
        "log10": sum(abs(math.log10(p) - math.log10(t)) for p, t in pairs) / count,
    }


def test_figures_are_those_of_their_definitions() -> None:
    true, predicted = random_depth(3, 8, 9), random_depth(3, 8, 9, seed=1)
    true[:, :3, :4] = 0
    true[1, 4:] = 0
    found = compute_errors(predicted, true)
    expected = by_definition(predicted.double().numpy(), true.double().numpy())
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    images = [by_definition(p.double().numpy(), t.double().numpy()) for p, t in zip(predicted, true, strict=True)]
    for name, value in found["detail"]["mean_over_images"].items():
        assert value == pytest.approx(np.mean([image[name] for image in images]), abs=1e-12)
    constant = by_definition(np.full(true.shape, 3.0), true.double().numpy())["delta_1"]
    assert found["constant_delta_1"] == pytest.approx(constant, abs=1e-12)


def test_unmeasured_pixels_are_ignored() -> None:
    true, predicted = random_depth(2, 6, 6), random_depth(2, 6, 6, seed=1)
    true[:, 2] = 0
    first = compute_errors(predicted, true)
    predicted[:, 2] = 1e6
    assert compute_errors(predicted, true) == first
    assert first["detail"]["pixels"] == 60
    with pytest.raises(RefusedError, match=r"--dense.min_depth"):
        compute_errors(predicted, torch.zeros(2, 6, 6))


def test_padding_rows_are_ignored() -> None:
    true, predicted = random_depth(3, 6, 6), random_depth(3, 6, 6, seed=1)
    metric = DepthErrors(METRES)
    metric.add(list(predicted), batch_of(true, there=2))
    assert metric.finish(ALONE) == compute_errors(predicted[:2], true[:2])


def test_eigen_s_region_of_nyuv2_is_the_published_one() -> None:
    mask = region_mask(480, 640, "eigen")
    expected = torch.zeros(480, 640, dtype=torch.bool)
    expected[45:471, 41:601] = True
    assert torch.equal(mask, expected)
    true, predicted = random_depth(1, 480, 640), random_depth(1, 480, 640, seed=1)
    predicted[0, ~expected] = 0.01
    cut = compute_errors(predicted[:, 45:471, 41:601], true[:, 45:471, 41:601])
    found = compute_errors(predicted, true, region="eigen")
    assert {name: found[name] for name in ("delta_1", "rmse", "rel")} == pytest.approx(
        {name: cut[name] for name in ("delta_1", "rmse", "rel")}, abs=1e-12
    )


@pytest.mark.parametrize("space", [METRES, INVERSE])
def test_alignment_takes_out_any_scale_and_shift(space: DepthSpace) -> None:
    true = random_depth(4, 12, 12)
    true[:, 0] = 0
    target = space.target(true)
    predicted = -3.0 * target + torch.arange(4.0).view(4, 1, 1)
    found = compute_errors(predicted, true, space, alignment="scale_shift")
    assert found["rmse"] == pytest.approx(0, abs=1e-4) and found["delta_1"] == 1.0
    noise = target + 0.1 * random_depth(4, 12, 12, seed=2, low=-1, high=1)
    scaled = compute_errors(7 * noise + 2, true, space, alignment="scale_shift")
    plain = compute_errors(noise, true, space, alignment="scale_shift")
    assert scaled["rel"] == pytest.approx(plain["rel"], rel=1e-4)
    assert plain["rel"] > 0.005


def test_the_alignment_is_the_least_squares_one_and_that_of_a_constant_is_the_mean() -> None:
    true, predicted = random_depth(1, 9, 9, low=2.0), random_depth(1, 9, 9, seed=5)
    columns = np.stack([predicted.double().numpy().ravel(), np.ones(81)], axis=1)
    solution, *_ = np.linalg.lstsq(columns, true.double().numpy().ravel())
    expected = by_definition((columns @ solution).reshape(9, 9), true[0].double().numpy())
    found = compute_errors(predicted, true, alignment="scale_shift")
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    constant = compute_errors(torch.full((1, 9, 9), 5.0), true, alignment="scale_shift")
    mean = by_definition(np.full((9, 9), true.double().numpy().mean()), true[0].double().numpy())
    assert {name: constant[name] for name in mean} == pytest.approx(mean, abs=1e-9)


def test_predictions_are_clamped_to_the_limits() -> None:
    true = torch.full((1, 2, 2), 5.0)
    assert compute_errors(torch.full((1, 2, 2), -4.0), true)["rmse"] == pytest.approx(5.0 - 1e-3)
    assert compute_errors(torch.full((1, 2, 2), 40.0), true)["rmse"] == pytest.approx(5.0)
    assert compute_errors(torch.full((1, 2, 2), -4.0), true, INVERSE)["rmse"] == pytest.approx(5.0), "1 / 0 is far away"
