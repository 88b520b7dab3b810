"""An image encoder with a linear head, and its loss: what MAE fine-tunes (He et al., A.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.models.image_encoder import ImageEncoder, OnImageEncoder
from trp_scale.models.initialise import initial_tensor, initialise_vision
from trp_scale.models.patches import Pixels

CLASSIFICATION = "classification"


class ImageClassification:
    """The mean over images of the cross-entropy of their targets, which the data makes (classification_batch.py)."""

    tasks: tuple[str, ...] = (CLASSIFICATION,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = ()
    in_a_graph = True

    def __init__(self) -> None:
        self._pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, images that are there."""
        return batch["row_weights"].double().sum().reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def logits(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C] of a batch's images [R, 3, S, S] uint8."""
        return forward(self._pixels(batch["images"]))

    def __call__(self, forward: Callable[..., Tensor], batch: Batch) -> TaskLosses:
        """Sums over images, in float64 like every task's sum."""
        logits = self.logits(forward, batch)
        losses = F.cross_entropy(logits.float(), batch["targets"], reduction="none")  # [R]
        total = losses.double() @ batch["row_weights"].double()
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))


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

    def __init__(self, config: ClassificationTaskConfig) -> None:
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
