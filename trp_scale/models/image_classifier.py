"""An image encoder with a linear head: what MAE fine-tunes (He et al., A.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.models.image_encoder import ImageEncoder
from trp_scale.models.initialise import initialise_vision


class ImageClassifier(nn.Module):
    """Mean of the patch tokens, or the class token, through a norm, dropout and one linear layer.

    With mean pooling the encoder's own last norm is left out and the mean is normalised instead (He et al.).

    Args:
        config: sizes, `downstream.classes`, pooling and dropout, and the seed of the initial weights.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__()
        self.pooling = config.downstream.pooling
        self.encoder = ImageEncoder(config)
        self.dropout = nn.Dropout(config.downstream.dropout)
        self.head = nn.Linear(config.model.hidden_size, config.downstream.classes)
        initialise_vision(self, seed=config.training.seed, std=config.model.initializer_range)
        with torch.no_grad():
            self.head.weight.mul_(HEAD_SCALE)

    @property
    def layers(self) -> list[nn.Module]:
        """The repeated blocks, each a unit of sharding."""
        return list(self.encoder.blocks)

    @property
    def depth(self) -> int:
        """The head's, and the last norm's."""
        return len(self.encoder.blocks) + 1

    def depth_of(self, name: str) -> int:
        """See engines/optimizer.py, `Layered`."""
        first, _, rest = name.partition(".")
        return self.encoder.depth_of(rest) if first == "encoder" else self.depth

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] normalised pixels -> [B, C] logits."""
        if self.pooling == "class":
            return self.head(self.dropout(self.encoder(images)[0][:, 0]))  # type: ignore[no-any-return]
        last = len(self.encoder.blocks) - 1
        mean = self.encoder(images, after=[last])[0][:, 1:].mean(1)  # [B, D]
        return self.head(self.dropout(self.encoder.norm(mean)))  # type: ignore[no-any-return]


HEAD_SCALE = 0.01
"""The head starts this much smaller than other matrices, so that all classes start almost equally likely."""
