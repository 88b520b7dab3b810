"""FLOPs of masked autoencoders against what torch counts in them, and what an adversary adds: next to nothing."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trp_scale.config import Config, CropsConfig, ModelConfig
from trp_scale.config.images import MaeMaskingConfig, MaeVisionConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings
from trp_scale.models.flops import mae_step_flops, relative_vectors
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig

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
    index: Literal["rounded", "relaxed"] = "rounded",
    decoder: Literal["transformer", "linear"] = "transformer",
    size: int = 24,
    **adversary: Any,
) -> Config:
    return MaeConfig(
        model=ModelConfig(layers=3, hidden_size=48, heads=4, intermediate_size=80),
        vision=MaeVisionConfig(
            patch_size=4,
            tokens=tokens,
            positions=positions,
            index=index,
            decoder=decoder,
            decoder_layers=2,
            decoder_hidden_size=32,
            decoder_heads=2,
        ),
        crops=CropsConfig(size=size),
        masking=MaeMaskingConfig(ratio=0.7),
        adversary=make_settings("adversary", **{"kind": "none", **adversary}),
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
    {"positions": "relative", "index": "relaxed"},
    {"positions": "relative", "index": "relaxed", "size": 40},
    {"decoder": "linear"},
    {"decoder": "linear", "positions": "relative"},
]


@pytest.mark.parametrize("computed", [True, False], ids=["as computed", "whole last block"])
@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_a_step_is_three_times_what_torch_counts_forward(settings: dict[str, Any], computed: bool) -> None:
    """The interpolation of relative tables left out."""
    config = small(**settings)
    found = counted(config, 5, whole=not computed) - interpolation(config)
    assert mae_step_flops(config, rows=5, computed=computed) == 3 * found


def interpolation(config: Config) -> int:
    """Of the table to the vectors of offsets, in all blocks, forward, without an adversary: of any number of rows."""
    model, vision = config.model, config.vision
    if vision.positions == "absolute":
        return 0
    sizes = [model.hidden_size // model.heads] * model.layers
    if vision.decoder == "transformer":
        sizes += [vision.decoder_hidden_size // vision.decoder_heads] * vision.decoder_layers
    return 2 * relative_vectors(config) * 50 * sum(sizes)


@pytest.mark.parametrize(
    ("index", "size", "expected"), [("rounded", 24, 56), ("relaxed", 24, 128), ("relaxed", 40, 232)]
)
def test_vectors_of_relative_positions(index: Any, size: int, expected: int) -> None:
    """7 x 7, 11 x 11 and 15 x 15 of them, with two more and then up to a multiple of 8."""
    assert relative_vectors(small(positions="relative", index=index, size=size)) == expected


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
    ("adversary", "more"),
    [
        ({"kind": "absolute_embedding"}, 0),
        ({"kind": "absolute_coordinate"}, 0),
        ({"kind": "relative_embedding", "positions": "relative"}, 2),
        ({"kind": "relative_embedding", "positions": "relative", "scope": "value"}, 0),
        ({"kind": "relative_coordinate", "positions": "relative"}, 4),
        ({"kind": "relative_coordinate", "positions": "relative", "index": "straight_through"}, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["encoder", "both"])
def test_an_adversary_adds_interpolations_alone(adversary: dict[str, Any], more: int, where: str) -> None:
    """Over the same model without one, forward and backward: as many vectors again, forward and for the table's
    gradient, and for a coordinate the gradient of both halves' weights. Absolute coordinates have one product, for the
    gradient of the shifted table: the masked patches by all patches."""
    config = small(where=where, **adversary)
    of_blocks = interpolation(config)
    if where == "encoder" and of_blocks:
        of_blocks -= 2 * relative_vectors(config) * 50 * (32 // 2) * 2
    added = more * of_blocks
    if adversary["kind"] == "absolute_coordinate":
        patches = (config.crops.size // config.vision.patch_size) ** 2
        masked = patches - int(patches * (1 - config.masking.ratio))
        added = 2 * patches * masked * (48 + (32 if where == "both" else 0))
    assert step_flops(config, perturbed=True) == step_flops(config, perturbed=False) + added
    if adversary["kind"] != "relative_coordinate":
        assert mae_step_flops(config, rows=1) == mae_step_flops(small(positions=config.vision.positions), rows=1)


def test_adpe_vit_b_adds_next_to_nothing() -> None:
    """0.21 % of one crop's step, once for a micro-batch of any number of crops; 0.27 % with what interpolates without
    it."""
    config = load_recipe("adpe_vit_b")
    assert config.adversary.kind == "relative_coordinate" and config.adversary.where == "both"
    without, with_it = step_flops(config, perturbed=False), step_flops(config, perturbed=True)
    assert with_it / without == pytest.approx(1.0021, abs=5e-5)
    assert with_it / mae_step_flops(config, rows=1, computed=True) == pytest.approx(1.00275, abs=5e-5)
