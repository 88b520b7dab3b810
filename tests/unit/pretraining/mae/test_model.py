"""The masked autoencoder equals the plain reference, perturbed or not: values and gradients of all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grids import always, grid
from tests.settings import changed
from tests.unit.methods.adversary.toy import stand_in_run
from tests.unit.models.plain_autoencoder import plain_forward
from tests.unit.models.small_images import config, crops, loss_of, perturbation, small_model
from trp_scale.config import Config
from trp_scale.methods.adversary.positions import position_adversary
from trp_scale.models.positions import to_perturbation
from trp_scale.pretraining.mae.model import MaskedAutoencoder

MODELS: dict[str, dict[str, Any]] = {
    "MAE": {"tokens": "visible"},
    "MAE+": {},
    "MAE+ linear": {"decoder": "linear"},
    "MAE relative": {"tokens": "visible", "positions": "relative"},
    "MAE rows first": {"tokens": "visible", "position_order": "row_column"},
    "MAE+ relative": {"positions": "relative"},
    "MAE+ relaxed": {"positions": "relative", "index": "relaxed"},
    "MAE relative bias": {"tokens": "visible", "positions": "relative", "mode": "bias"},
    "MAE+ bias, values": {"positions": "relative", "index": "relaxed", "mode": "bias", "values": True},
    "MAE+ values linear": {"positions": "relative", "values": True, "decoder": "linear"},
    "MAE+ relaxed linear": {"positions": "relative", "index": "relaxed", "decoder": "linear"},
}

BIAS = {"positions": "relative", "mode": "bias"}

ADVERSARIES: dict[str, dict[str, Any]] = {
    "absolute embedding": {"kind": "absolute_embedding", "mask_token": "learned"},
    "absolute coordinate": {"kind": "absolute_coordinate"},
    "absolute coordinate, rows first": {"kind": "absolute_coordinate", "position_order": "row_column"},
    "per bucket": {"kind": "relative_embedding", "positions": "relative"},
    "value": {"kind": "relative_embedding", "scope": "value", "positions": "relative"},
    "shared": {"kind": "relative_embedding", "scope": "shared", "positions": "relative"},
    "relative coordinate": {"kind": "relative_coordinate", "positions": "relative"},
    "bias, per bucket": {"kind": "relative_embedding", **BIAS},
    "bias, shared": {"kind": "relative_embedding", "scope": "shared", **BIAS},
    "bias, coordinate": {"kind": "relative_coordinate", **BIAS},
    "bias and values, value": {"kind": "relative_embedding", "scope": "value", "values": True, **BIAS},
    "values, per bucket": {"kind": "relative_embedding", "positions": "relative", "values": True},
    "bias and values, coordinate": {"kind": "relative_coordinate", "values": True, **BIAS},
    "values, straight through": {
        "kind": "relative_coordinate",
        "positions": "relative",
        "index": "straight_through",
        "values": True,
    },
    "straight through": {"kind": "relative_coordinate", "positions": "relative", "index": "straight_through"},
}


DIFFERENT = (
    *("absolute embedding", "absolute coordinate", "per bucket", "shared", "relative coordinate", "bias, shared"),
    *("bias, coordinate", "bias and values, value", "values, straight through"),
)
"""Adversaries that others are like."""


def named(value: Any) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def settings_of(settings: dict[str, Any]) -> Config:
    """Settings of a small model; `index` sets the adversary's index if there is an adversary."""
    settings = dict(settings)
    index = settings.pop("index", None) if "kind" in settings else None
    made = config(**settings)
    if index is not None:
        made = changed(made, adversary={"index": index})
    return made


def built(settings: dict[str, Any]) -> MaskedAutoencoder:
    return small_model(settings_of(settings))


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_the_prediction(settings: dict[str, Any]) -> None:
    model, batch = built(settings), crops(1)
    torch.testing.assert_close(model(*batch).prediction, plain_forward(model, batch), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("settings", "where"), grid(ADVERSARIES.values(), ["encoder", "both"]), ids=named)
def test_under_a_perturbation(settings: dict[str, Any], where: str) -> None:
    """A shift of two patches reaches the edge of the table and the logarithm."""
    model, batch = built(settings | {"where": where}), crops(1)
    vector = perturbation(model, scale=2.0)
    parts = [to_perturbation(part, model.adversary) for part in model.shape.split(vector.detach())]
    assert (model.shape.decoder is None) == (where == "encoder")
    found, expected = model(*batch, perturbation=vector).prediction, plain_forward(model, batch, *parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    clean = model(*batch).prediction
    assert settings.get("scope") == "shared" or float((found - clean).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("settings", always(ADVERSARIES.values(), *map(ADVERSARIES.get, DIFFERENT)), ids=named)
def test_gradients_at_perturbed_positions_and_the_ascent(settings: dict[str, Any]) -> None:
    """Gradients of weights and perturbation; then a step of the adversary, cut off at the ball's edge."""
    ascent = {"ascent": "sgd", "lr": 50.0, "eps": 2.0}
    config, batch = settings_of(settings | {"where": "both", **ascent}), crops(1)
    model = small_model(config)
    vector, plain = perturbation(model, scale=2.0), perturbation(model, scale=2.0)
    loss_of(model, batch, vector).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    parts = [to_perturbation(part, model.adversary) for part in model.shape.split(plain)]
    target = batch.patches.gather(1, batch.masked.unsqueeze(-1).expand(-1, -1, batch.patches.shape[-1]))
    (plain_forward(model, batch, *parts) - target).square().mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10, msg=name)
        assert parameter.grad is not None and parameter.grad.any(), name
    if settings.get("index") == "straight_through":  # tests/unit/models/test_relative_positions.py
        return
    torch.testing.assert_close(vector.grad, plain.grad, rtol=0, atol=1e-10)
    hook = position_adversary(config.adversary, stand_in_run(config))
    with torch.no_grad():
        hook.vector.copy_(vector)
    hook.gradient = vector.grad.float()
    hook.ascend(1.0)
    climbed = (plain.detach() + 50.0 * plain.grad).clamp(-2.0, 2.0)
    torch.testing.assert_close(hook.vector.detach().double(), climbed, rtol=1e-6, atol=1e-6)


CASES: list[dict[str, Any]] = [
    {"tokens": "visible"},
    {"tokens": "visible", "positions": "relative"},
    {"kind": "relative_embedding", **BIAS},
    {"kind": "relative_coordinate", "values": True, **BIAS},
    {"kind": "relative_embedding", "scope": "value", "positions": "relative"},
    {"kind": "relative_embedding", "scope": "value", "positions": "relative", "values": True, "decoder": "linear"},
    *(
        {"decoder": decoder, "positions": "relative", "kind": kind}
        for decoder in ("transformer", "linear")
        for kind in ("none", "absolute_embedding", "absolute_coordinate", "relative_embedding", "relative_coordinate")
    ),
]


def vector_of(model: MaskedAutoencoder) -> Tensor | None:
    """Return a perturbation as a leaf in fp32, as the adversary has it."""
    return None if model.shape is None else perturbation(model).detach().float().requires_grad_()


@pytest.mark.parametrize(("case", "given"), grid(CASES, [True, False]), ids=named)
def test_every_parameter_takes_part_in_every_forward_pass(case: dict[str, Any], given: bool) -> None:
    """ZeRO-3 keeps the last gradient of unused parameters."""
    model = small_model(config(**case), dtype=torch.float32)
    vector = vector_of(model) if given else None
    loss_of(model, crops(dtype=torch.float32), vector).backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert vector is None or (vector.grad is not None and vector.grad.isfinite().all() and vector.grad.any())


@pytest.mark.parametrize(("case", "way"), grid(CASES, ["bf16 autocast", "bf16 weights", "fp16 weights"]), ids=named)
def test_low_precision_is_near_single_precision(case: dict[str, Any], way: str) -> None:
    reference = small_model(config(**case), dtype=torch.float32)
    batch = crops(dtype=torch.float32)
    vector = vector_of(reference)
    expected = loss_of(reference, batch, vector)
    dtype = {"bf16 autocast": torch.float32, "bf16 weights": torch.bfloat16, "fp16 weights": torch.float16}[way]
    model = small_model(config(**case), dtype=torch.float32)
    for parameter in model.parameters():  # DeepSpeed leaves buffers as they are
        parameter.data = parameter.data.to(dtype)
    low = None if vector is None else vector.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16 autocast"):
        prediction = model(*batch, perturbation=low).prediction
    assert prediction.dtype == (torch.float16 if way == "fp16 weights" else torch.bfloat16)
    target = batch.patches.gather(1, batch.masked.unsqueeze(-1).expand_as(prediction))
    loss = (prediction.float() - target).square().mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.05)
    if low is not None and vector is not None:
        loss.backward()  # type: ignore[no-untyped-call]
        expected.backward()  # type: ignore[no-untyped-call]
        assert low.grad is not None and vector.grad is not None and low.grad.dtype == torch.float32
        similarity = torch.cosine_similarity(low.grad, vector.grad, dim=0)
        assert float(similarity) > (0.99 if way == "fp16 weights" else 0.9)


@pytest.mark.parametrize(
    "case",
    [
        {"tokens": "visible"},
        {"positions": "relative", "kind": "relative_coordinate"},
        {"kind": "relative_coordinate", "values": True, **BIAS},
    ],
    ids=named,
)
def test_it_is_one_graph_of_static_shapes(case: dict[str, Any]) -> None:
    """fullgraph refuses reads of values on the host and branches on values."""
    settings = config(**case)
    settings.model.layers = settings.vision.decoder_layers = 1
    model = small_model(settings, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    batch, vector = crops(dtype=torch.float32), vector_of(model)
    found = loss_of(compiled, batch, vector)  # type: ignore[arg-type]
    torch.testing.assert_close(found, loss_of(model, batch, vector), rtol=1e-5, atol=0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        loss_of(compiled, crops(seed=1, dtype=torch.float32), vector)  # type: ignore[arg-type]
