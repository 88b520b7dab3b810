"""A pre-trained encoder on whole images, whatever it was trained by."""

from __future__ import annotations

import torch

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.evaluation.encoder_source import open_encoder
from trp_scale.evaluation.tasks.base import take_encoder
from trp_scale.models.image_encoder import ImageEncoder


def load_encoder(path: str, size: int = 0) -> tuple[ImageEncoder, int]:
    """The encoder of --from, for images of `size` pixels, and that size.

    Args:
        path: as for `open_encoder`.
        size: 0 = that of the images it was pre-trained on.

    Raises:
        RefusedError: no such encoder, one of text, or a size that patches do not fill.
    """
    config = FinetuneConfig()
    config.downstream.kind = "classification"
    source = open_encoder(path)
    source.adopt(config)
    patch_size = config.vision.patch_size
    config.crops.size = size or config.downstream.pretraining_grid * patch_size
    if config.crops.size < 2 * patch_size or config.crops.size % patch_size:
        raise RefusedError(
            f"--size is {config.crops.size}, allowed: multiples of the patches' {patch_size} pixels, two or more"
        )
    weights = source.image_weights(config.crops.size // patch_size)
    encoder = ImageEncoder(config, norm="norm.weight" in weights)
    take_encoder(encoder, weights, path)
    return encoder.eval().to(device()), config.crops.size


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
