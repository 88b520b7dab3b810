"""FLOPs of masked autoencoders against what torch counts in them, and what an adversary adds: next to nothing."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trp_scale.config import Config, CropsConfig, ModelConfig
from trp_scale.config.components import settings_of
from trp_scale.config.images import MaeMaskingConfig, MaeVisionConfig
from trp_scale.observe.throughput import mae_step_flops
from trp_scale.recipes.loader import load_recipe
from trp_scale.upstreams.mae.model import MaskedAutoencoder
from trp_scale.upstreams.mae.settings import MaeConfig

Positions = Literal["absolute", "relative"]


def vit_base(
    *, size: int = 112, tokens: Literal["visible", "all"] = "all", positions: Positions = "absolute"
) -> Config:
    return MaeConfig(
        model=ModelConfig(layer_norm_eps=1e-6),
        vision=MaeVisionConfig(tokens=tokens, positions=positions),
        crops=CropsConfig(size=size),
        masking=MaeMaskingConfig(ratio=0.75),
    )


def small(
    *,
    tokens: Literal["visible", "all"] = "all",
    positions: Positions = "absolute",
    decoder: Literal["transformer", "linear"] = "transformer",
    **adversary: Any,
) -> Config:
    return MaeConfig(
        model=ModelConfig(layers=3, hidden_size=48, heads=4, intermediate_size=80),
        vision=MaeVisionConfig(
            patch_size=4,
            tokens=tokens,
            positions=positions,
            decoder=decoder,
            decoder_layers=2,
            decoder_hidden_size=32,
            decoder_heads=2,
        ),
        crops=CropsConfig(size=24),
        masking=MaeMaskingConfig(ratio=0.7),
        adversary=settings_of("adversary", **{"kind": "none", **adversary}),
    )


def counted(config: Config, rows: int, *, whole: bool = False) -> int:
    """Multiply-adds that torch counts, times two, in a forward pass; `whole` lets the last block compute all tokens."""
    model = MaskedAutoencoder(config)
    if whole:
        last = model.layers[-1]
        forward = last.forward
        last.forward = lambda *arguments: forward(*arguments[:-1], None)[:, -arguments[-1] :]  # type: ignore[method-assign]
    order = torch.arange(model.grid**2).expand(rows, -1)
    visible = int(model.grid**2 * (1 - config.masking.ratio))
    patches = torch.zeros(rows, model.grid**2, 3 * config.vision.patch_size**2)
    # Written out in matrix products: torch has no count for the CPU's own attention.
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(patches, order[:, :visible], order[:, visible:])
    return counter.get_total_flops()


MODELS: list[dict[str, Any]] = [
    {"tokens": "visible"},
    {"tokens": "visible", "positions": "relative"},
    {},
    {"positions": "relative"},
    {"decoder": "linear"},
    {"decoder": "linear", "positions": "relative"},
]


@pytest.mark.parametrize("computed", [True, False], ids=["as computed", "whole last block"])
@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_a_step_is_three_times_what_torch_counts_forward(settings: dict[str, Any], computed: bool) -> None:
    config = small(**settings)
    assert mae_step_flops(config, rows=5, computed=computed) == 3 * counted(config, 5, whole=not computed)


def test_vit_base_by_hand() -> None:
    """Forward of He et al.'s MAE on 224 pixels: 12 blocks of 768 on 50 tokens, 8 of 512 on 197."""
    encoder = 12 * (24 * 50 * 768**2 + 4 * 50**2 * 768) + 2 * 49 * 768**2
    decoder = 8 * (24 * 197 * 512**2 + 4 * 197**2 * 512) + 2 * 50 * 768 * 512 + 2 * 147 * 512 * 768
    assert mae_step_flops(vit_base(size=224, tokens="visible"), rows=2) == 3 * 2 * (encoder + decoder)


def test_one_crop_of_mae_plus_is_0_58_of_mae() -> None:
    ratio = mae_step_flops(vit_base(), rows=1) / mae_step_flops(vit_base(size=224, tokens="visible"), rows=1)
    assert ratio == pytest.approx(0.58, abs=0.005)


def step_flops(config: Config, *, perturbed: bool) -> int:
    """FLOPs that torch counts forward and backward for one crop, with the adversary's gradient; nothing is computed."""
    with torch.device("meta"):
        model = MaskedAutoencoder(config)
        vector = torch.zeros(model.shape.numel, requires_grad=True) if perturbed and model.shape is not None else None
        order = torch.zeros(1, model.grid**2, dtype=torch.int64)
        patches = torch.zeros(1, model.grid**2, 3 * config.vision.patch_size**2)
    visible = int(model.grid**2 * (1 - config.masking.ratio))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(patches, order[:, :visible], order[:, visible:], perturbation=vector).prediction.sum().backward()
    assert not perturbed or (vector is not None and vector.grad is not None)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "adversary",
    [
        {"kind": "absolute_embedding"},
        {"kind": "absolute_coordinate"},
        {"kind": "relative_embedding", "positions": "relative"},
        {"kind": "relative_embedding", "positions": "relative", "scope": "value"},
    ],
    ids=str,
)
def test_an_adversary_adds_no_products(adversary: dict[str, Any]) -> None:
    """Over the same model without one, forward and backward, in the encoder and in the decoder."""
    config = small(where="both", **adversary)
    assert step_flops(config, perturbed=True) == step_flops(config, perturbed=False)
    assert mae_step_flops(config, rows=1) == mae_step_flops(small(positions=config.vision.positions), rows=1)


def of_interpolation(config: Config) -> int:
    """The weights' gradient in the encoder, and in the decoder where it is perturbed too.

    Each head of each masked query has two more products in the backward pass: what the forward pass has there, 7 x 7
    nodes by the span of the columns and 7 x span by the span of the rows.
    """
    patches = (config.crops.size // config.vision.patch_size) ** 2
    span, masked = 2 * math.isqrt(patches) - 1, patches - int(patches * (1 - config.masking.ratio))
    heads = config.model.layers * config.model.heads
    if config.adversary.where == "both":
        heads += config.vision.decoder_layers * config.vision.decoder_heads
    return masked * heads * (2 * 7 * 7 * span + 2 * 7 * span**2)


@pytest.mark.parametrize("where", ["encoder", "both"])
@pytest.mark.parametrize("index", ["relaxed", "straight_through"])
def test_relative_coordinates_add_the_gradient_of_the_interpolation(index: str, where: str) -> None:
    config = small(kind="relative_coordinate", positions="relative", index=index, where=where)
    assert step_flops(config, perturbed=True) == step_flops(config, perturbed=False) + of_interpolation(config)


def test_adpe_vit_b_adds_less_than_a_thousandth() -> None:
    """0.06 % of the step in the encoder, 0.11 % in the encoder and the decoder."""
    config = load_recipe("adpe_vit_b")
    assert config.adversary.kind == "relative_coordinate"
    config.adversary.where = "encoder"
    without, with_it = step_flops(config, perturbed=False), step_flops(config, perturbed=True)
    assert with_it == without + of_interpolation(config) < 1.001 * without
    assert with_it / without == pytest.approx(1.00057, abs=5e-6)
    config.adversary.where = "both"
    assert of_interpolation(config) / without == pytest.approx(0.00108, abs=5e-6)
