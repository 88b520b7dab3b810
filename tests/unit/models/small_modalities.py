"""A tiny multi-modal masked autoencoder with weights that all matter, and its objective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.synthetic_modalities import CLASSES, batch, modality_config
from tests.unit.models.small_images import randomise_weights
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.models.positions import PositionOrder, sine_cosine
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction

ALL = ("rgb", "depth", "semseg")
EVERY_TASK = (*ALL, "raw_rgb")


def config(
    inputs: tuple[str, ...] = ALL,
    outputs: tuple[str, ...] = ALL,
    visible_tokens: int = 9,
    encoder_norm: bool = False,
    position_order: PositionOrder = "column_row",
    **changes: Any,
) -> Config:
    """The synthetic run's, with narrower decoders and other modalities."""
    modalities = {"inputs": list(inputs), "outputs": list(outputs), "visible_tokens": visible_tokens}
    modalities |= {"encoder_norm": encoder_norm}
    vision = {"decoder_hidden_size": 16, "position_order": position_order}
    return modality_config(modalities=modalities, vision=vision, **changes)


def small_model(settings: Config, *, dtype: torch.dtype = torch.float64) -> MultimodalMaskedAutoencoder:
    """Every weight is drawn anew, large enough that all of them matter."""
    model = MultimodalMaskedAutoencoder(settings, {"semseg": CLASSES})
    randomise_weights(model, seed=100)
    model.to(dtype)
    if dtype == torch.float64:  # as exact as the weights
        model.positions = sine_cosine(model.grid, settings.model.hidden_size, model.position_order)
        for decoder in model.decoders.values():
            decoder.positions = sine_cosine(model.grid, settings.vision.decoder_hidden_size, model.position_order)
    return model


def model_inputs(settings: Config, first: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Patches of the input modalities and the visible tokens of two rows; some labels are void."""
    modalities = settings.modalities
    rows = batch(range(first, first + 2), modalities.visible_tokens, len(modalities.inputs))
    objective = MultimodalReconstruction(settings)
    return objective.seen(objective.patches(rows), rows), rows["visible"]


def changed(rows: Batch, **fields: Any) -> Batch:
    """The batch with some of its fields replaced."""
    assert not set(fields) - set(rows.fields)
    return replace(rows, fields={**rows.fields, **fields})
