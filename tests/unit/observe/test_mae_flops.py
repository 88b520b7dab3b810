"""FLOPs of masked autoencoders against what torch counts in them, and what an adversary adds: next to nothing."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trp_scale.config import AdversaryConfig, Config, CropsConfig, MaskingConfig, ModelConfig, VisionConfig
from trp_scale.models.mae import MaskedAutoencoder
from trp_scale.observe.throughput import mae_step_flops

Positions = Literal["absolute", "relative"]


def vit_base(
    *, size: int = 112, tokens: Literal["visible", "all"] = "all", positions: Positions = "absolute"
) -> Config:
    return Config(
        model=ModelConfig(kind="mae", dropout=0.0, layer_norm_eps=1e-6),
        vision=VisionConfig(tokens=tokens, positions=positions),
        crops=CropsConfig(size=size),
        masking=MaskingConfig(ratio=0.75),
    )


def small(
    *,
    tokens: Literal["visible", "all"] = "all",
    positions: Positions = "absolute",
    decoder: Literal["transformer", "linear"] = "transformer",
    **adversary: Any,
) -> Config:
    return Config(
        model=ModelConfig(kind="mae", layers=3, hidden_size=48, heads=4, intermediate_size=80),
        vision=VisionConfig(
            patch_size=4,
            tokens=tokens,
            positions=positions,
            decoder=decoder,
            decoder_layers=2,
            decoder_hidden_size=32,
            decoder_heads=2,
        ),
        crops=CropsConfig(size=24),
        masking=MaskingConfig(ratio=0.7),
        adversary=AdversaryConfig(**adversary),
    )


def counted(config: Config, rows: int, *, perturbed: bool = False, whole: bool = False) -> int:
    """Multiply-adds that torch counts, times two, in a forward pass; `whole` lets the last block compute all tokens."""
    model = MaskedAutoencoder(config)
    if whole:
        last = model.layers[-1]
        forward = last.forward
        last.forward = lambda *arguments: forward(*arguments[:-1], None)[:, -arguments[-1] :]  # type: ignore[method-assign]
    order = torch.arange(model.grid**2).expand(rows, -1)
    visible = int(model.grid**2 * (1 - config.masking.ratio))
    patches = torch.zeros(rows, model.grid**2, 3 * config.vision.patch_size**2)
    vector = torch.zeros(model.shape.numel) if perturbed and model.shape is not None else None
    # Written out in matrix products: torch has no count for the CPU's own attention.
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(patches, order[:, :visible], order[:, visible:], perturbation=vector)
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


@pytest.mark.parametrize(
    "adversary",
    [
        {"kind": "absolute_embedding"},
        {"kind": "absolute_coordinate"},
        {"kind": "relative_embedding", "positions": "relative"},
        {"kind": "relative_embedding", "positions": "relative", "scope": "value"},
        {"kind": "relative_coordinate", "positions": "relative"},
        {"kind": "relative_coordinate", "positions": "relative", "index": "straight_through"},
    ],
    ids=str,
)
def test_an_adversary_adds_less_than_a_thousandth(adversary: dict[str, Any]) -> None:
    """Over the same model without one, in the encoder and in the decoder."""
    config = small(where="both", **adversary)
    plain = small(positions=adversary.get("positions", "absolute"))
    without, with_it = counted(plain, 2), counted(config, 2, perturbed=True)
    assert without <= with_it < 1.001 * without
    assert mae_step_flops(config, rows=1) == mae_step_flops(plain, rows=1)
