"""The encoder of a multi-modal run as a directory that timm loads: a vision transformer of images alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trp_scale.checkpoint.export import Export
from trp_scale.config import RefusedError
from trp_scale.recipes.loader import from_dict
from trp_scale.upstreams.mae.export import check_timm, read_weights, write_encoder
from trp_scale.upstreams.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.upstreams.mm_mae.settings import MmMaeConfig

CLASSES = "map_classes"
"""In `CheckpointDocument.extra`: number of classes of each modality's maps, which the model's shapes depend on."""

RGB_TOKENISER = "tokenisers.rgb."


def images_alone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A multi-modal model's weights by the names of a masked autoencoder: the tokeniser of images is its patch
    embedding.

    Without modalities.encoder_norm there is no last norm. One of gain 1 and offset 0 stands in its place, which is what
    a vision transformer has that takes MultiMAE's published weights.
    """
    named = {name.replace(RGB_TOKENISER, "patch_embed."): tensor for name, tensor in weights.items()}
    width = named["cls_token"].shape[-1]
    return {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)} | named


def write_multimodal_timm(asked: Export) -> None:
    """Write the encoder with the tokeniser of images, without a head, for
    `timm.create_model("local-dir:DIRECTORY", pretrained=True)`.

    What timm computes of an image is what the encoder does with all its patches visible and none of another modality,
    through a layer norm (`images_alone`).

    Raises:
        RefusedError: the run saw no images, or timm has no such model.
        CheckpointError: the checkpoint is damaged, or is not of the model that its settings describe.
    """
    config = from_dict(asked.document.config, source=str(asked.checkpoint))
    assert isinstance(config, MmMaeConfig)
    if "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--to timm: the run's modalities.inputs are {', '.join(config.modalities.inputs)}: its encoder reads no "
            "images; allowed: a run with rgb among them"
        )
    check_timm(config, asked.image_size)
    model = MultimodalMaskedAutoencoder(config, asked.document.extra[CLASSES])
    weights = read_weights(asked.checkpoint, model, asked.state)
    write_encoder(asked.directory, config, images_alone(weights), asked.image_size)
