"""The masked autoencoder's loss against a plain computation over masked patches of present rows; U-MAE's loss and its
gradient against all pairs in float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_images import image_config, image_trainer
from tests.unit.models.small_images import CROPS, GRID, PATCH, VALUES, VISIBLE, config, image_rows, small_model
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import StepContext
from trp_scale.distributed.groups import ALONE
from trp_scale.methods.adversary.positions import PixelAdversary
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, ImagePatches, patchify, unpatchify
from trp_scale.models.positions import Perturbation
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeObjectiveConfig
from trp_scale.pretraining.mae.upstream import (
    MOMENT,
    ROWS,
    MaskedPatchReconstruction,
    Uniformity,
    UniformPatchReconstruction,
)

IMAGES, SIDE, MASKED = 3, GRID * PATCH, GRID**2 - VISIBLE


class Recorder:
    """A model that predicts fixed values and records its inputs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.prediction = torch.randn(IMAGES * CROPS, MASKED, VALUES, generator=generator)

    def __call__(self, patches: Tensor, visible: Tensor, masked: Tensor, **extras: Any) -> SimpleNamespace:
        self.patches, self.visible, self.masked, self.extras = patches, visible, masked, extras
        return SimpleNamespace(prediction=self.prediction)


def slow_sum(rows: Batch, prediction: Tensor, normalised: bool) -> float:
    """Return the sum of errors, patch by patch and pixel by pixel."""
    total = 0.0
    for row in range(IMAGES):
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
    rows, model = image_rows([1.0] * IMAGES), Recorder()
    objective = MaskedPatchReconstruction(MaeObjectiveConfig(), PATCH)
    clean = objective(model, rows).sums.item()
    seen = model.patches
    shift = torch.full((IMAGES, CROPS, 3, SIDE, SIDE), 0.5)
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


SETTINGS = MaeObjectiveConfig(uniformity=0.3)
MODELS: dict[str, dict[str, Any]] = {
    "mae": {"tokens": "visible"},
    "mae plus, relative": {"positions": "relative"},
    "linear decoder": {"decoder": "linear"},
}


def objective() -> UniformPatchReconstruction:
    return UniformPatchReconstruction(SETTINGS, PATCH, ALONE)


def all_pairs(model: MaskedAutoencoder, batches: list[Batch]) -> Tensor:
    """Return the mean over pairs of present rows, pair by pair, with a graph through both rows."""
    tokens = [model(objective().patches(one), one["visible"].flatten(0, 1), one["masked"].flatten(0, 1),
                    output="prediction_and_class").class_token for one in batches]  # fmt: skip
    there = torch.cat([one["row_weights"].repeat_interleave(CROPS) for one in batches]) > 0
    rows = [token / token.norm() for token in torch.cat(tokens)[there]]
    pairs = [(one @ other) ** 2 for one in rows for other in rows]
    return torch.stack(pairs).mean()


def gradients(model: MaskedAutoencoder, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(p) if g is None else g
            for name, p, g in zip(names, parameters, found, strict=True)}  # fmt: skip


def split(batches: list[Batch], model: MaskedAutoencoder) -> list[Batch]:
    """Add the extras of the hook: the rows for one micro-batch, the moment for several."""
    rows = torch.stack([objective().count(one)[1] for one in batches]).sum()
    if len(batches) == 1:
        return [replace(batches[0], extras={ROWS: rows})]
    moment = torch.stack([objective().moment(model, one) for one in batches]).sum(0) / rows
    return [replace(one, extras={MOMENT: moment}) for one in batches]


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("parts", [1, 3])
def test_sums_over_rows_are_the_mean_over_pairs_and_its_gradient(settings: dict[str, Any], parts: int) -> None:
    model = small_model(config(**settings)).double()
    weights = [[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]] if parts == 1 else [[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    batches = [image_rows(one, seed=seed) for seed, one in enumerate(weights)]
    losses = [objective()(model, one) for one in split(batches, model)]
    sums, counts = (torch.stack([getattr(one, name) for one in losses]).sum(0) for name in ("sums", "counts"))
    assert counts[1] == CROPS * sum(map(sum, weights)) and counts[1] == sum(objective().count(b)[1] for b in batches)
    reference = all_pairs(model, batches)
    assert 0.05 < float(reference.detach()) < 0.95
    mean = sums[1] / counts[1]
    torch.testing.assert_close(mean, reference, rtol=1e-12, atol=0)
    found, expected = gradients(model, mean), gradients(model, reference)
    assert sum(float(one.norm()) for one in expected.values()) > 1e-3
    for name, one in expected.items():
        torch.testing.assert_close(
            found[name], one, rtol=1e-9, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_the_reconstruction_is_that_of_the_plain_objective(settings: dict[str, Any]) -> None:
    model = small_model(config(**settings))
    (batch,) = split([image_rows([1.0, 0.0, 1.0])], model)
    plain = MaskedPatchReconstruction(SETTINGS, PATCH)(model, batch)
    ours = objective()(model, batch)
    torch.testing.assert_close(ours.sums[:1], plain.sums, rtol=1e-6, atol=0)  # of the errors in fp32
    assert torch.equal(ours.counts[:1], plain.counts)
    assert objective().outside_weights(ours.counts).tolist() == [0.0, SETTINGS.uniformity]
    assert (objective().tasks, objective().balanced) == (("reconstruction", "uniformity"), (0,))


def test_without_a_moment_the_task_is_absent() -> None:
    model, batch = small_model(config()), image_rows([1.0, 1.0])
    losses = objective()(model, batch)
    plain = MaskedPatchReconstruction(SETTINGS, PATCH)(model, batch)
    assert torch.equal(losses.sums[:1], plain.sums)
    assert (losses.sums[1], losses.counts[1]) == (0.0, 0.0)
    errors = objective().errors(model, batch)
    assert torch.equal(objective().losses(2.0 * errors, batch).sums, 2.0 * losses.sums)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_every_pass_gives_the_same_class_token_and_prediction(settings: dict[str, Any]) -> None:
    model = small_model(config(**settings))
    batch = image_rows([1.0, 1.0])
    arguments = objective().patches(batch), batch["visible"].flatten(0, 1), batch["masked"].flatten(0, 1)
    gate = torch.rand(arguments[1].shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    both = model(*arguments, gate=gate, output="prediction_and_class")
    assert both.class_token.shape == (2 * CROPS, 24)
    torch.testing.assert_close(model(*arguments, gate=gate, output="class_token"), both.class_token, rtol=1e-12, atol=0)
    torch.testing.assert_close(model(*arguments, gate=gate).prediction, both.prediction, rtol=1e-9, atol=1e-12)
    assert model(*arguments, gate=gate).class_token is None
    patches, visible, masked = arguments
    seen = masked[:, : 0 if settings == MODELS["mae"] else None]
    entering = model.embed(patches, visible, seen, Perturbation(), gate)
    whole = model.run(model.blocks, entering, torch.cat([visible, seen], dim=1), seen.shape[1], Perturbation(), None)
    torch.testing.assert_close(model.norm(whole[:, 0]), both.class_token, rtol=1e-12, atol=0)


PIXELS = {"kind": "pixels", "norm": "l2", "eps": 2.0}


def start_first_step(micro_size: int, **changes: Any) -> tuple[Any, StepContext, Uniformity]:
    """Return a trainer, the context of its first step, and the hook."""
    layout = Layout(micro_size=micro_size)
    changes["objective"] = {"uniformity": 0.5}
    trainer, _ = image_trainer(layout, image_config(layout, **changes))
    window = trainer.source.next_window()
    ctx = trainer.context(window, torch.stack([trainer.objective.count(micro) for micro in window]).sum(0))
    (hook,) = (hook for hook in trainer.hooks.all if isinstance(hook, Uniformity))
    return trainer, ctx, hook


def test_moment_uses_shifted_pixels_and_adversary_pass_has_no_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    trainer, ctx, hook = start_first_step(4, adversary=PIXELS)
    losses_of = trainer.objective.__call__

    def watched(forward: Any, batch: Any) -> Any:
        seen.append(MOMENT in batch.extras)
        return losses_of(forward, batch)

    monkeypatch.setattr(type(trainer.objective), "__call__", lambda self, *arguments: watched(*arguments))
    trainer.hooks.before_step(ctx)
    assert seen == [False, False]
    shifted = hook.batch(ctx, ctx.window[0]).extras[MOMENT]
    with torch.no_grad():
        clean = sum(trainer.objective.moment(trainer.engine, micro) for micro in ctx.window) / ctx.counts[1]
        again = sum(trainer.objective.moment(trainer.engine, ctx.apply_hooks(micro)) for micro in ctx.window)
    assert any(isinstance(hook, PixelAdversary) for hook in trainer.hooks.all)
    assert (shifted - clean).norm() > 1e-4 * clean.norm()
    torch.testing.assert_close(shifted, again / ctx.counts[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_device_normalises_in_fp32(precision: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    mean, deviation = (
        torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (CHANNEL_MEAN, CHANNEL_DEVIATION)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        found = ImagePatches(8)(every)
    assert found.dtype == torch.float32
    exact = patchify((every.double() / 255 - mean) / deviation, 8)
    torch.testing.assert_close(found.double(), exact, rtol=1e-7, atol=5e-7)  # of numbers up to 2.6
