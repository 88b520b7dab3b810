"""Cross-entropy of one label for each row, hard or soft."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.batch import Batch, TaskLosses
from trp_scale.objectives.image_patches import CHANNEL_DEVIATION, CHANNEL_MEAN

CLASSIFICATION = "classification"


class ImageClassification:
    """The mean over images of the cross-entropy of their class.

    Args:
        classes: C.
        smoothing: label smoothing: this share of the target is spread over all classes (Szegedy et al.).
    """

    tasks: tuple[str, ...] = (CLASSIFICATION,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = ()

    def __init__(self, classes: int, smoothing: float = 0.0) -> None:
        self.classes, self.smoothing = classes, smoothing
        self._pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, images that are there."""
        return batch["row_weights"].double().sum().reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def logits(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C] of a batch's images [R, 3, S, S] uint8."""
        return forward(self._pixels(batch["images"].flatten(0, 1)))

    def __call__(self, forward: Callable[..., Tensor], batch: Batch) -> TaskLosses:
        """Sums over images, in float64 like every task's sum. Rows that are not there have class 0 and weight 0."""
        logits = self.logits(forward, batch)
        labels = batch["labels"].clamp(min=0)
        losses = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=self.smoothing)  # [R]
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
