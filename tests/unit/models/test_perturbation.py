"""Perturbed positions: no effect at zero, gradients, and the effects of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.small_images import GRID, config, crops, loss_of, perturbation, small_model
from trp_scale.config import ModelConfig
from trp_scale.config.images import MaeVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.models.positions import BUCKETS, perturbation_shape, relaxed_index
from trp_scale.pretraining.mae.model import MaskedAutoencoder

BIAS = {"positions": "relative", "mode": "bias"}

KINDS: dict[str, dict[str, Any]] = {
    "absolute embedding": {"kind": "absolute_embedding"},
    "absolute coordinate": {"kind": "absolute_coordinate"},
    "per bucket": {"kind": "relative_embedding", "positions": "relative"},
    "value": {"kind": "relative_embedding", "scope": "value", "positions": "relative"},
    "relative coordinate": {"kind": "relative_coordinate", "positions": "relative"},
    "bias per bucket": {"kind": "relative_embedding", **BIAS},
    "bias coordinate": {"kind": "relative_coordinate", **BIAS},
    "values coordinate": {"kind": "relative_coordinate", "positions": "relative", "values": True},
}

RELATIVE = {"kind": "relative_embedding", "positions": "relative"}


def built(**settings: Any) -> MaskedAutoencoder:
    return small_model(config(**settings))


def gradient(model: MaskedAutoencoder, vector: Tensor) -> Tensor:
    return torch.autograd.grad(loss_of(model, crops(), vector), vector)[0]


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (KINDS["absolute embedding"], {}),
        (KINDS["absolute coordinate"], {}),
        (KINDS["per bucket"], {"positions": "relative"}),
        (KINDS["value"] | {"index": "relaxed"}, {"positions": "relative", "index": "relaxed"}),
        (KINDS["relative coordinate"], {"positions": "relative", "index": "relaxed"}),
        (KINDS["bias per bucket"], BIAS),
        (KINDS["bias coordinate"], {"index": "relaxed", **BIAS}),
        (KINDS["values coordinate"], {"positions": "relative", "index": "relaxed", "values": True}),
    ],
    ids=KINDS,
)
def test_at_zero_it_is_the_model_without_an_adversary(settings: dict[str, Any], reference: dict[str, Any]) -> None:
    """For relative coordinates, compare with the model with a relaxed index."""
    model, clean = built(**settings), built(**reference)
    assert clean.shape is None
    zeros = torch.zeros_like(perturbation(model))
    torch.testing.assert_close(model(*crops(), zeros), clean(*crops()), rtol=0, atol=1e-14)


@pytest.mark.parametrize("where", ["encoder", "both"])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_the_gradient_is_that_of_central_differences(settings: dict[str, Any], where: str) -> None:
    model = built(where=where, **settings)
    vector = perturbation(model, scale=1.5).detach()
    step = 1e-5
    if settings["kind"] == "relative_coordinate":
        assert away_from_nodes(vector, step)
    found = gradient(model, vector.clone().requires_grad_())
    for element in torch.linspace(0, len(vector) - 1, min(24, len(vector))).long().tolist():
        ahead, behind = vector.clone(), vector.clone()
        ahead[element] += step
        behind[element] -= step
        with torch.no_grad():
            difference = (loss_of(model, crops(), ahead) - loss_of(model, crops(), behind)) / (2 * step)
        assert float(found[element]) == pytest.approx(float(difference), rel=1e-6, abs=1e-9), element
    assert found.abs().max() > 1e-4


def away_from_nodes(vector: Tensor, step: float) -> bool:
    """Whether no offset of the grid, shifted by any element, comes within the step of a node or of the clamp."""
    offsets = torch.arange(1 - GRID, GRID)
    indices = relaxed_index(vector[:, None] + offsets)  # [numel, 2G-1]
    return bool(((indices - indices.round()).abs() > 10 * step).all())


def test_a_learned_mask_token_can_undo_an_embedding() -> None:
    model = built(kind="absolute_embedding", mask_token="learned")
    vector = perturbation(model)
    loss_of(model, crops(), vector).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(vector.grad, model.mask_token.grad, rtol=1e-12, atol=0)
    with torch.no_grad():
        undone = built(kind="absolute_embedding", mask_token="learned")
        undone.mask_token.sub_(vector)
        torch.testing.assert_close(undone(*crops(), vector), built()(*crops()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("given", [True, False])
def test_a_frozen_mask_token_gets_a_gradient_of_zero(given: bool) -> None:
    """The gradient is zero, not `None`, because ZeRO-3 would keep the last one."""
    model = built(kind="absolute_embedding", mask_token="frozen")
    loss_of(model, crops(), perturbation(model) if given else None).backward()  # type: ignore[no-untyped-call]
    assert model.mask_token.grad is not None and not model.mask_token.grad.any()
    other = built(kind="absolute_coordinate")  # nothing there undoes a shift of coordinates
    loss_of(other, crops()).backward()  # type: ignore[no-untyped-call]
    assert other.mask_token.grad is not None and other.mask_token.grad.all()


@pytest.mark.parametrize("where", ["encoder", "both"])
@pytest.mark.parametrize(("index", "mode"), [("rounded", "contextual"), ("relaxed", "contextual"), ("rounded", "bias")])
def test_a_shared_vector_for_all_buckets_has_no_effect(where: str, index: str, mode: str) -> None:
    model = built(scope="shared", where=where, mode=mode, **RELATIVE)
    model.vision.index = index  # type: ignore[assignment]
    clean = loss_of(model, crops()).detach()
    for seed in range(3):
        vector = 20.0 * perturbation(model, seed=seed).sign()  # a corner of the l-infinity ball of Table A.2
        assert abs(float(loss_of(model, crops(), vector).detach() / clean) - 1) < 1e-12


@pytest.mark.parametrize(
    ("adversary", "encoder", "decoder"),
    [
        ({"kind": "absolute_embedding"}, (1, 768), (1, 512)),
        ({"kind": "absolute_coordinate"}, (1, 2), (1, 2)),
        ({"kind": "relative_embedding"}, (12, BUCKETS, 64), (8, BUCKETS, 32)),
        ({"kind": "relative_embedding", "scope": "value"}, (12, 64), (8, 32)),
        ({"kind": "relative_embedding", "scope": "shared"}, (12, 64), (8, 32)),
        ({"kind": "relative_coordinate"}, (12, 2), (8, 2)),
        ({"kind": "relative_embedding", "mode": "bias"}, (12, BUCKETS, 1), (8, BUCKETS, 1)),
        ({"kind": "relative_embedding", "mode": "bias", "scope": "shared"}, (12, 1), (8, 1)),
        ({"kind": "relative_embedding", "mode": "bias", "scope": "value"}, (12, 64), (8, 32)),
    ],
    ids=lambda value: str(value),
)
def test_shapes_of_vit_base(adversary: dict[str, Any], encoder: tuple[int, ...], decoder: tuple[int, ...]) -> None:
    adversary = dict(adversary)
    mode = adversary.pop("mode", "contextual")
    sizes = (ModelConfig(), MaeVisionConfig(positions="relative", relative_mode=mode))
    shape = perturbation_shape(*sizes, make_settings("adversary", **adversary))
    both = perturbation_shape(*sizes, make_settings("adversary", where="both", **adversary))
    assert (shape.encoder, shape.decoder, both.encoder, both.decoder) == (encoder, None, encoder, decoder)
    flat = torch.arange(both.numel)
    first, second = both.split(flat)
    assert torch.equal(torch.cat([first.flatten(), second.flatten()]), flat)
    assert torch.equal(shape.split(flat[: shape.numel])[0], first) and shape.split(flat[: shape.numel])[1] is None
    assert first.data_ptr() == flat.data_ptr()  # views: a gradient of the one is a gradient of the other


@pytest.mark.parametrize("kind", ["none", "pixels"])
def test_other_adversaries_have_no_shape(kind: Any) -> None:
    assert perturbation_shape(ModelConfig(), MaeVisionConfig(), make_settings("adversary", kind)) is None
