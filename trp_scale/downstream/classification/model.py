"""An image encoder with a linear head: what MAE fine-tunes (He et al., A.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.models.image_encoder import ImageEncoder, OnImageEncoder
from trp_scale.models.initialise import initial_tensor, initialise_vision

HEAD_DEVIATION = 2e-5
"""Standard deviation of the head's first weights: all classes start equally likely. MAE truncates at 2, which is
100,000 deviations."""


class ImageClassifier(OnImageEncoder):
    """Mean of the patch tokens, or the class token, through a norm, dropout and one linear layer.

    With mean pooling the encoder has no last norm; the mean is normalised by one of the head's own, `fc_norm` (He et
    al., A.1). It starts at gain 1 and offset 0: what a last norm has learned was for single tokens that a decoder
    reads, and a mean of many tokens has another spread.

    Args:
        config: sizes, `downstream.classes`, pooling and dropout, and the seed of the initial weights.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__()
        width = config.model.hidden_size
        mean = config.downstream.pooling == "mean"
        self.encoder = ImageEncoder(config, norm=not mean)
        self.fc_norm = nn.LayerNorm(width, eps=config.model.layer_norm_eps) if mean else None
        self.dropout = nn.Dropout(config.downstream.dropout)
        self.head = nn.Linear(width, config.downstream.classes)
        initialise_vision(self, seed=config.training.seed, std=config.model.initializer_range)
        with torch.no_grad():
            shape = (config.downstream.classes, width)
            self.head.weight.copy_(initial_tensor(config.training.seed, "head.weight", shape, HEAD_DEVIATION))

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] normalised pixels -> [B, C] logits."""
        tokens = self.encoder(images)[0]  # [B, 1 + N, D]
        pooled = tokens[:, 0] if self.fc_norm is None else self.fc_norm(tokens[:, 1:].mean(1))  # [B, D]
        return self.head(self.dropout(pooled))  # type: ignore[no-any-return]
