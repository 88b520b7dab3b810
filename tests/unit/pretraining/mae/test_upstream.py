"""The masked autoencoder's loss against a plain computation over masked patches of present rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.small_images import CROPS, GRID, PATCH, VALUES, VISIBLE, image_rows
from trp_scale.core.batch import Batch
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, patchify, unpatchify
from trp_scale.pretraining.mae.settings import MaeObjectiveConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction

ROWS, SIDE, MASKED = 3, GRID * PATCH, GRID**2 - VISIBLE


class Recorder:
    """A model that predicts fixed values and records its inputs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.prediction = torch.randn(ROWS * CROPS, MASKED, VALUES, generator=generator)

    def __call__(self, patches: Tensor, visible: Tensor, masked: Tensor, **extras: Any) -> SimpleNamespace:
        self.patches, self.visible, self.masked, self.extras = patches, visible, masked, extras
        return SimpleNamespace(prediction=self.prediction)


def slow_sum(rows: Batch, prediction: Tensor, normalised: bool) -> float:
    """Return the sum of errors, patch by patch and pixel by pixel."""
    total = 0.0
    for row in range(ROWS):
        for crop in range(CROPS):
            image = rows["images"][row, crop].double() / 255
            for place, number in enumerate(rows["masked"][row, crop].tolist()):
                top, left = number // GRID * PATCH, number % GRID * PATCH
                values = [
                    float((image[c, top + y, left + x] - CHANNEL_MEAN[c]) / CHANNEL_DEVIATION[c])
                    for y in range(PATCH)
                    for x in range(PATCH)
                    for c in range(3)
                ]
                if normalised:
                    mean = sum(values) / VALUES
                    variance = sum((value - mean) ** 2 for value in values) / (VALUES - 1)
                    values = [(value - mean) / (variance + 1e-6) ** 0.5 for value in values]
                guess = prediction[row * CROPS + crop, place].tolist()
                error = sum((a - b) ** 2 for a, b in zip(guess, values, strict=True)) / VALUES
                total += float(rows["row_weights"][row]) * error
    return total


@pytest.mark.parametrize("target", ["normalised", "pixels"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
def test_the_loss_is_the_mean_squared_error_of_masked_patches(target: Any, weights: list[float]) -> None:
    rows, model = image_rows(weights), Recorder()
    objective = MaskedPatchReconstruction(MaeObjectiveConfig(target=target), PATCH)
    losses = objective(model, rows)
    assert losses.counts.tolist() == [sum(weights) * CROPS * MASKED] == objective.count(rows).tolist()
    assert losses.sums.item() == pytest.approx(slow_sum(rows, model.prediction, target == "normalised"), rel=1e-6)
    assert losses.sums.dtype == torch.float64
    assert model.extras == {}


def test_pixel_shift_changes_the_model_input_and_not_the_target() -> None:
    rows, model = image_rows([1.0] * ROWS), Recorder()
    objective = MaskedPatchReconstruction(MaeObjectiveConfig(), PATCH)
    clean = objective(model, rows).sums.item()
    seen = model.patches
    shift = torch.full((ROWS, CROPS, 3, SIDE, SIDE), 0.5)
    rows.extras = {"pixel_shift": shift, "perturbation": torch.ones(2)}
    assert objective(model, rows).sums.item() == clean
    expected = 0.5 / torch.tensor(CHANNEL_DEVIATION)
    assert torch.allclose((model.patches - seen).view(-1, 3), expected.expand(model.patches.numel() // 3, 3), atol=1e-5)
    assert model.extras["perturbation"].tolist() == [1.0, 1.0]


def test_unpatchify_is_the_inverse_of_patchify() -> None:
    images = torch.randn(2, 3, SIDE, SIDE)
    patches = patchify(images, PATCH)
    assert patches.shape == (2, GRID**2, VALUES)
    assert torch.equal(unpatchify(patches, PATCH), images)
    # Patch 9 is the last of the second row; its values go row by row, the channels of a pixel side by side.
    assert torch.equal(patches[1, 9], images[1, :, 4:8, 16:20].permute(1, 2, 0).flatten())
