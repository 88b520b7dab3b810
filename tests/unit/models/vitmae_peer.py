"""transformers' ViTMAE with random weights and fixed positions, and its view of our crops."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import ViTMAEForPreTraining

from tests.unit.models.small_images import GRID, PATCH, Crops, randomise_weights
from trp_scale.config import Config
from trp_scale.models.patches import unpatchify
from trp_scale.pretraining.mae.weights import stored_positions, vitmae_config


def vitmae(config: Config, *, seed: int = 0) -> ViTMAEForPreTraining:
    """Weights drawn so that all of them matter; not in training mode."""
    peer = ViTMAEForPreTraining(vitmae_config(config)).eval()
    randomise_weights(peer, seed=seed)
    order = config.vision.position_order
    with torch.no_grad():
        peer.vit.embeddings.position_embeddings.copy_(stored_positions(GRID, config.model.hidden_size, order))
        peer.decoder.decoder_pos_embed.copy_(stored_positions(GRID, config.vision.decoder_hidden_size, order))
    return peer


def images_and_noise(batch: Crops) -> tuple[Tensor, Tensor]:
    """[B, 3, S, S] and [B, N]: the images of these patches, and noise whose smallest values choose the visible ones."""
    noise = torch.ones(batch.patches.shape[:2], dtype=batch.patches.dtype).scatter(1, batch.visible, 0.0)
    ranks = torch.arange(GRID**2, dtype=noise.dtype) / GRID**2 / 2  # no ties
    return unpatchify(batch.patches, PATCH), noise + ranks
