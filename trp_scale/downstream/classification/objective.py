"""Cross-entropy of each image's shares of the classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.models.image_patches import CHANNEL_DEVIATION, CHANNEL_MEAN

CLASSIFICATION = "classification"


class ImageClassification:
    """The mean over images of the cross-entropy of their targets, which the data makes (classification_batch.py)."""

    tasks: tuple[str, ...] = (CLASSIFICATION,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = ()

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


class Pixels:
    """Bytes into normalised pixels."""

    def __init__(self) -> None:
        self._statistics = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION])  # [2, 3]

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] uint8 -> float32 without ImageNet's mean and deviation."""
        if self._statistics.device != images.device:
            self._statistics = self._statistics.to(images.device)
        mean, deviation = self._statistics.view(2, 1, 3, 1, 1)
        pixels: Tensor = (images.float() / 255.0 - mean) / deviation
        return pixels
