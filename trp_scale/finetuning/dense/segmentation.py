"""Semantic segmentation: fine-tuning on the class of each pixel (TRP 4.2.3 and Table 7, MLO-MAE B.6, AdPE 5.2). The
objective is cross-entropy; mean intersection over union, pixel accuracy and mean class accuracy come from one confusion
matrix over all pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.data.images.formats import Map
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.dense.batch import SegmentationMaps
from trp_scale.finetuning.dense.settings import SegmentationTaskConfig
from trp_scale.finetuning.dense.task import DenseData, DenseTask, predict_whole
from trp_scale.finetuning.task import TaskObjective, distinct
from trp_scale.models.patches import Pixels
from trp_scale.reporting.results import CONSTANT


class SegmentationTask(DenseTask[SegmentationTaskConfig]):
    """Classes of pixels; see `DownstreamTask`."""

    metric = "mean_iou"
    maps = SegmentationMaps

    def __init__(self, config: SegmentationTaskConfig, environment: Environment) -> None:
        super().__init__(config, environment)
        self.objective = Segmentation(config.dense.auxiliary_weight)

    def complete(self, data: DenseData, measured: DenseData) -> int:
        assert isinstance(data.maps, SegmentationMaps) and isinstance(measured.maps, SegmentationMaps)
        if data.maps.all_classes != measured.maps.all_classes:
            raise RefusedError(
                f"--downstream.test_path {self.config.downstream.test_path} has other classes than --data.path "
                f"{self.config.data.path}; shard both with the same --semseg.classes"
            )
        self.classes, self._stored = data.maps.classes, measured.maps.stored_numbers
        self.config.downstream.classes = len(self.classes)
        return len(self.classes)

    def predict(self, forward: Callable[..., list[Tensor]], batch: Batch) -> list[Tensor]:
        """The class of each pixel of each whole image, [H, W] int64."""
        return [logits.argmax(0) for logits in predict_whole(forward, self.objective.pixels, batch)]

    def numbers(self, predicted: Tensor, member: int) -> Map:
        """Each class by its number in the stored maps, ignored classes counted."""
        stored: Map = self._stored[predicted.cpu().numpy()]
        return stored

    def metrics(self) -> Confusion:
        return Confusion(self.classes)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}


VOID = 255
"""Class number of pixels that are not learned, in batches as in stored maps."""


class Segmentation(TaskObjective):
    """The mean over all pixels with a class of the cross-entropy; that of an auxiliary head is added with its weight.

    Args:
        auxiliary_weight: of the second prediction, where the model has one.
    """

    tasks: tuple[str, ...] = ("segmentation",)

    def __init__(self, auxiliary_weight: float = 0.0) -> None:
        self._weights = (1.0, auxiliary_weight)
        self.pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, pixels with a class."""
        return (batch["semseg"] != VOID).sum().double().reshape(1)

    def __call__(self, forward: Callable[..., list[Tensor]], batch: Batch) -> TaskLosses:
        """Sums over pixels. Rows that are not there are void."""
        labels = batch["semseg"].long()  # [R, S, S]
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for weight, logits in zip(self._weights, forward(self.pixels(batch["images"])), strict=False):
            losses = F.cross_entropy(logits.float(), labels, ignore_index=VOID, reduction="none")  # [R, S, S]
            total = total + weight * losses.sum(dtype=torch.float64)
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))


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
            labelled = labels < size  # void is 255
            pairs = labels[labelled] * size + predicted[labelled].long()
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
        f"{CONSTANT}mean_iou": float(constant),
        "detail": {
            "iou": {name: _number(value) for name, value in zip(names, iou.tolist(), strict=True)},
            "accuracy": {name: _number(value) for name, value in zip(names, accuracy.tolist(), strict=True)},
            "pixels": {name: int(value) for name, value in zip(names, labelled.tolist(), strict=True)},
        },
    }


def _number(value: float) -> float | None:
    return None if value != value else value
