"""The masked autoencoder computes what the plain one does, perturbed or not: values, and gradients of all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.settings import changed
from tests.unit.models.plain_autoencoder import plain_forward
from tests.unit.models.small_images import config, crops, loss_of, perturbation, small_model
from trp_scale.models.perturbation import perturbed_attribute
from trp_scale.pretraining.mae.model import MaskedAutoencoder

MODELS: dict[str, dict[str, Any]] = {
    "MAE": {"tokens": "visible"},
    "MAE+": {},
    "MAE+ linear": {"decoder": "linear"},
    "MAE relative": {"tokens": "visible", "positions": "relative"},
    "MAE rows first": {"tokens": "visible", "position_order": "row_column"},
    "MAE+ relative": {"positions": "relative"},
    "MAE+ relaxed": {"positions": "relative", "index": "relaxed"},
    "MAE+ relaxed linear": {"positions": "relative", "index": "relaxed", "decoder": "linear"},
}

ADVERSARIES: dict[str, dict[str, Any]] = {
    "absolute embedding": {"kind": "absolute_embedding", "mask_token": "learned"},
    "absolute coordinate": {"kind": "absolute_coordinate"},
    "absolute coordinate, rows first": {"kind": "absolute_coordinate", "position_order": "row_column"},
    "per bucket": {"kind": "relative_embedding", "positions": "relative"},
    "value": {"kind": "relative_embedding", "scope": "value", "positions": "relative"},
    "shared": {"kind": "relative_embedding", "scope": "shared", "positions": "relative"},
    "relative coordinate": {"kind": "relative_coordinate", "positions": "relative"},
    "straight through": {"kind": "relative_coordinate", "positions": "relative", "index": "straight_through"},
}


def built(settings: dict[str, Any]) -> MaskedAutoencoder:
    """`index` of an adversary is the adversary's."""
    settings = dict(settings)
    index = settings.pop("index", None) if "kind" in settings else None
    made = config(**settings)
    if index is not None:
        made = changed(made, adversary={"index": index})
    return small_model(made)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_the_prediction(settings: dict[str, Any]) -> None:
    model, batch = built(settings), crops()
    torch.testing.assert_close(model(*batch).prediction, plain_forward(model, batch), rtol=0, atol=1e-11)


@pytest.mark.parametrize("where", ["encoder", "both"])
@pytest.mark.parametrize("settings", ADVERSARIES.values(), ids=ADVERSARIES)
def test_under_a_perturbation(settings: dict[str, Any], where: str) -> None:
    """Two patches of shift, so that the table's edge and the logarithm are in play."""
    model, batch = built(settings | {"where": where}), crops(1)
    vector = perturbation(model, scale=2.0)
    assert model.shape is not None
    parts = [perturbed_attribute(part, model.adversary) for part in model.shape.split(vector.detach())]
    assert (model.shape.decoder is None) == (where == "encoder")
    found, expected = model(*batch, perturbation=vector).prediction, plain_forward(model, batch, *parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    clean = model(*batch).prediction
    assert settings.get("scope") == "shared" or float((found - clean).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("settings", ADVERSARIES.values(), ids=ADVERSARIES)
def test_the_weights_gradients_are_those_at_the_perturbed_positions(settings: dict[str, Any]) -> None:
    model, batch = built(settings | {"where": "both"}), crops(1)
    vector = perturbation(model, scale=2.0)
    loss_of(model, batch, vector).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert model.shape is not None
    parts = [perturbed_attribute(part, model.adversary) for part in model.shape.split(vector.detach())]
    target = batch.patches.gather(1, batch.masked.unsqueeze(-1).expand(-1, -1, batch.patches.shape[-1]))
    (plain_forward(model, batch, *parts) - target).square().mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10, msg=name)
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("tokens", ["visible", "all"])
def test_the_order_in_which_patches_come_does_not_matter(tokens: Any) -> None:
    model, batch = built({"tokens": tokens, "positions": "relative", "index": "relaxed"}), crops()
    visible, masked = (torch.randperm(numbers.shape[1]) for numbers in (batch.visible, batch.masked))
    shuffled = batch._replace(visible=batch.visible[:, visible], masked=batch.masked[:, masked])
    expected = model(*batch).prediction[:, masked]
    torch.testing.assert_close(model(*shuffled).prediction, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss_of(model, shuffled), loss_of(model, batch), rtol=1e-13, atol=0)
