"""An image encoder with a head that gives every pixel a value."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.downstream.dense.heads.build import build_head
from trp_scale.models.image_encoder import ImageEncoder, OnImageEncoder
from trp_scale.models.initialise import initialise_vision


class PixelModel(OnImageEncoder):
    """Encoder and head; see models/dense_heads.

    Args:
        config: sizes, section dense, and the seed of the initial weights.
        outputs: C, values of each pixel.
    """

    def __init__(self, config: FinetuneConfig, outputs: int) -> None:
        super().__init__()
        self.encoder = ImageEncoder(config)
        initialise_vision(self, seed=config.training.seed, std=config.model.initializer_range)
        self.head = build_head(config, self.encoder.shape, outputs)

    def forward(self, images: Tensor) -> list[Tensor]:
        """[B, 3, S, S] normalised pixels -> [B, C, S, S], and as many of an auxiliary head if there is one."""
        blocks = sorted(set(self.head.after))
        found = dict(zip(blocks or [0], self.encoder(images, after=blocks), strict=True))
        maps = self.head([found[number] for number in self.head.after] or [found[0]])
        size = images.shape[-2:]
        return [F.interpolate(each, size=size, mode="bilinear", align_corners=False) for each in maps]
