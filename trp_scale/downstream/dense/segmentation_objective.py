"""Cross-entropy of the class of each pixel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.downstream.classification.model import Pixels

SEGMENTATION = "segmentation"

VOID = 255
"""Class number of pixels that are not learned, in batches as in stored maps."""


class Segmentation:
    """The mean over all pixels with a class of the cross-entropy; that of an auxiliary head is added with its weight.

    Args:
        auxiliary_weight: of the second prediction, where the model has one.
    """

    tasks: tuple[str, ...] = (SEGMENTATION,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = ()

    def __init__(self, auxiliary_weight: float = 0.0) -> None:
        self._weights = (1.0, auxiliary_weight)
        self.pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, pixels with a class."""
        return (batch["semseg"] != VOID).sum().double().reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., list[Tensor]], batch: Batch) -> TaskLosses:
        """Sums over pixels. Rows that are not there are void."""
        labels = batch["semseg"].long()  # [R, S, S]
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for weight, logits in zip(self._weights, forward(self.pixels(batch["images"])), strict=False):
            losses = F.cross_entropy(logits.float(), labels, ignore_index=VOID, reduction="none")  # [R, S, S]
            total = total + weight * losses.sum(dtype=torch.float64)
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))
