"""Cross-entropy of a sentence's label, or the square error of its score."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses

INPUTS = ("tokens", "token_types", "places", "owners", "first_places", "slots")
"""What the model reads of a batch, in its order."""


class SentenceClassification:
    """The mean over rows of the cross-entropy of their label; with one class, of the square error of their score.

    Args:
        task: name of the loss.
        classes: C, width of the head.
    """

    balanced: tuple[int, ...] = (0,)

    def __init__(self, task: str, classes: int) -> None:
        self.tasks: tuple[str, ...] = (task,)
        self.regression: tuple[int, ...] = (0,) if classes == 1 else ()
        self._errors = _square_errors if classes == 1 else _cross_entropies

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, rows that are there."""
        return batch["row_weights"].double().sum().reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def logits(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C]."""
        return forward(*(batch[name] for name in INPUTS))

    def __call__(self, forward: Callable[..., Tensor], batch: Batch) -> TaskLosses:
        """Sums over rows, in float64 like every task's sum."""
        errors = self._errors(self.logits(forward, batch).float(), batch["labels"])  # [R]
        total = errors.double() @ batch["row_weights"].double()
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))


def _cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _square_errors(logits: Tensor, scores: Tensor) -> Tensor:
    return (logits.squeeze(1) - scores).square()
