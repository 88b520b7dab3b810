"""The multi-modal masked autoencoder equals the plain reference: values and gradients of all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.models.plain_modalities import plain_forward
from tests.unit.models.small_modalities import ALL, EVERY_TASK, config, model_inputs, small_model

MODELS: dict[str, dict[str, Any]] = {
    "all": {},
    "in another order, with raw rgb": {"inputs": ("semseg", "rgb", "depth"), "outputs": ("depth", *EVERY_TASK[2:])},
    "rgb alone, everything predicted": {"inputs": ("rgb",), "outputs": EVERY_TASK, "visible_tokens": 5},
    "no rgb, only rgb predicted": {"inputs": ("semseg", "depth"), "outputs": ("rgb",)},
    "nearly everything visible": {"visible_tokens": 47},
    "one token": {"visible_tokens": 1},
    "a norm after the encoder": {"encoder_norm": True},
    "rows before columns": {"position_order": "row_column"},
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_predictions_and_gradients(case: dict[str, Any]) -> None:
    settings = config(**case)
    model = small_model(settings)
    patches, visible = model_inputs(settings)
    found, expected = model(patches, visible).predictions, plain_forward(model, patches, visible)
    assert [each.shape for each in found] == [each.shape for each in expected] and len(found) == len(model.outputs)
    generator = torch.Generator().manual_seed(1)
    along = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in found]
    parameters = dict(model.named_parameters())
    losses = [sum((a * b).mean() for a, b in zip(some, along, strict=True)) for some in (found, expected)]
    ours = torch.autograd.grad(losses[0], list(parameters.values()))  # all of them take part
    theirs = torch.autograd.grad(losses[1], list(parameters.values()), materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        assert other.std() > 0.1
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=name)
        assert case or one.any(), name


def test_masked_patches_are_not_read() -> None:
    """Other values in masked patches change no prediction, and in a visible patch change all of them."""
    settings = config()
    model = small_model(settings)
    patches, visible = model_inputs(settings)
    before = model(patches, visible).predictions
    count = model.grid**2
    masked = torch.ones(len(visible), 3 * count, dtype=torch.bool).scatter(1, visible, False)
    hidden = {
        name: torch.where(masked[:, i * count : (i + 1) * count, None], 3 - values.clamp(0, 1), values)
        for i, (name, values) in enumerate(patches.items())
    }
    assert all(not torch.equal(hidden[name], patches[name]) for name in ALL)
    for one, other in zip(model(hidden, visible).predictions, before, strict=True):
        assert torch.equal(one, other)
    modality, place = ALL[int(visible[0, 0]) // count], int(visible[0, 0]) % count
    shown = {name: values.clone() for name, values in patches.items()}
    shown[modality][0, place] = 3 - shown[modality][0, place].clamp(0, 1)
    for one, other in zip(model(shown, visible).predictions, before, strict=True):
        assert (one[0] != other[0]).any(-1).all() and torch.equal(one[1], other[1])
