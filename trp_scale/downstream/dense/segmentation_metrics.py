"""Mean intersection over union, pixel accuracy and mean class accuracy, from one confusion matrix over all pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.downstream.task import distinct


class Confusion:
    """Counts pixels by their class and the predicted one; see `Metrics`. The counts are integers, so any number of
    ranks gives the same figures.

    Args:
        classes: their names.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self._counts: Tensor | None = None

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Each row's predicted classes [H, W]; those of rows that are not there meet void labels alone."""
        size = len(self._classes)
        for row, (predicted, (height, width)) in enumerate(zip(outputs, batch["sizes"].tolist(), strict=True)):
            labels = batch["whole_semseg"][row, :height, :width].long()
            there = labels < size  # void is 255
            pairs = labels[there] * size + predicted[there].long()
            counts = torch.bincount(pairs, minlength=size**2).view(size, size)
            self._counts = counts if self._counts is None else self._counts + counts

    def finish(self, group: Group) -> dict[str, Any]:
        """The figures (`figures`) of all ranks' pixels."""
        assert self._counts is not None  # every rank has micro-batches, if only of rows that are not there
        return figures(group.sum(self._counts).cpu(), self._classes)


def figures(counts: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """The figures of a confusion matrix.

    mean_iou: the mean over classes of intersection / union; a class that is neither labelled nor predicted anywhere has
    none and is left out. pixel_accuracy: share of the labelled pixels. class_accuracy: the mean over labelled classes
    of the share of their pixels. constant_mean_iou: mean_iou of predicting the most frequent class everywhere: what a
    model that has learned nothing of images gets.

    Args:
        counts: [C, C] integers, labels x predictions.
        classes: names.

    Raises:
        RefusedError: no pixel has a class.
    """
    counts = counts.double()  # exact up to 2^53 pixels
    labelled, predicted, right = counts.sum(1), counts.sum(0), counts.diagonal()
    if not labelled.sum():
        raise RefusedError(
            "every measured pixel is void: there is nothing to measure; look at the label maps, --dense.ignored and "
            "--downstream.test_path"
        )
    union = labelled + predicted - right
    iou, accuracy = right / union, right / labelled  # not a number where there is no pixel
    names = distinct(classes)
    constant = labelled.max() / labelled.sum() / (labelled > 0).sum()
    return {
        "mean_iou": float(iou[union > 0].mean()),
        "pixel_accuracy": float(right.sum() / labelled.sum()),
        "class_accuracy": float(accuracy[labelled > 0].mean()),
        "constant_mean_iou": float(constant),
        "detail": {
            "iou": {name: _number(value) for name, value in zip(names, iou.tolist(), strict=True)},
            "accuracy": {name: _number(value) for name, value in zip(names, accuracy.tolist(), strict=True)},
            "pixels": {name: int(value) for name, value in zip(names, labelled.tolist(), strict=True)},
        },
    }


def _number(value: float) -> float | None:
    return None if value != value else value
