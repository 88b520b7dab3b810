"""FLOPs of the multi-modal masked autoencoder against what torch counts in it, and against the sum by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.synthetic_modalities import CLASSES, modality_config
from trp_scale.config import Config
from trp_scale.config.loader import load_recipe
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.tokens import RunModalities
from trp_scale.pretraining.mm_mae.upstream import mm_mae_step_flops

CLASS_COUNTS = {"semseg": CLASSES}


def counted(config: Config, rows: int, classes: Mapping[str, int]) -> int:
    """Multiply-adds that torch counts, times two, in a forward pass; nothing is computed."""
    with torch.device("meta"):
        model = MultimodalMaskedAutoencoder(config, classes)
        used = RunModalities(config).used
        patches = {
            name: torch.zeros(rows, model.grid**2, used[name].channels * used[name].side ** 2)
            for name in config.modalities.inputs
        }
        visible = torch.zeros(rows, config.modalities.visible_tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(patches, visible)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "modalities",
    [
        {},
        {"outputs": ["semseg", "raw_rgb", "rgb", "depth"], "visible_tokens": 30},
        {"inputs": ["rgb"], "outputs": ["depth"], "visible_tokens": 5},
    ],
    ids=str,
)
def test_a_step_is_three_times_what_torch_counts_forward(modalities: dict[str, Any]) -> None:
    config = modality_config(modalities=modalities, vision={"decoder_layers": 2})
    assert mm_mae_step_flops(config, rows=5, classes=CLASS_COUNTS, computed=True) == 3 * counted(
        config, 5, CLASS_COUNTS
    )


def test_vit_base_by_hand() -> None:
    """12 blocks of 768 on 99 tokens; three decoders of 256 on 196 places: a cross-attention, an MLP, two blocks."""
    encoder = 12 * (24 * 99 * 768**2 + 4 * 99**2 * 768)
    tokenisers = 2 * 98 * 768 * (768 + 256 + 16 * 64)  # each token through all three
    cross = 2 * 99 * 768 * 256 + 4 * 196 * 256**2 + 4 * 99 * 256**2 + 4 * 196 * 99 * 256 + 16 * 196 * 256**2
    decoders = 3 * (cross + 2 * (24 * 196 * 256**2 + 4 * 196**2 * 256))
    predictions = 2 * 196 * 256 * (768 + 256 + 16 * 133)
    config = load_recipe("mm_mae_vit_b_in1k_400")
    rest = encoder + decoders + predictions
    assert mm_mae_step_flops(config, rows=2, classes={"semseg": 133}, computed=True) == 3 * 2 * (rest + tokenisers)
    assert mm_mae_step_flops(config, rows=2, classes={"semseg": 133}) == 3 * 2 * (rest + tokenisers / 3)
