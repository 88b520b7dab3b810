"""Object detection and instance segmentation (AdPE 5.2; MLO-MAE 3.5.2 and D.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.sources import Rows
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError
from trp_scale.finetuning.detection.annotations import Annotations, check_images, read_coco, read_voc
from trp_scale.finetuning.detection.batch import DetectionBatchBuilder
from trp_scale.finetuning.detection.metrics import VOC_METRIC, DetectionMetrics, InferenceSpeed, PredictedObjects
from trp_scale.finetuning.detection.model import Detector, Target, paste
from trp_scale.finetuning.detection.settings import DetectionTaskConfig
from trp_scale.finetuning.task import ImageTask, TaskObjective, has_training_data, open_task_sources
from trp_scale.models.patches import Pixels


def open_detection(paths: Sequence[MemberPath], images: str, *, masks: bool) -> list[Annotations]:
    """Read the annotations of data sets, and check that their images exist.

    Args:
        paths: COCO files (.json), folders with one COCO file, or Pascal VOC folders or lists (.txt).
        images: folder of the images; empty = search the usual folders.
        masks: read masks too.

    Raises:
        DataError: a file is missing, damaged or of another format.
        RefusedError: the mixture has COCO and Pascal VOC data sets.
    """
    datasets = [_open(path, images, masks=masks) for path in paths]
    for dataset in datasets:
        check_images(dataset)
    if len({dataset.voc for dataset in datasets}) > 1:
        raise RefusedError("--data.path mixes COCO and Pascal VOC data sets, which have different metrics")
    classes = list(dict.fromkeys(name for dataset in datasets for name in dataset.classes))
    return [dataset.with_classes(classes) for dataset in datasets]


def _open(member: MemberPath, images: str, *, masks: bool) -> Annotations:
    path = member.path
    if path.suffix == ".json" and path.is_file():
        return read_coco(path, images, masks=masks)
    if (path / "Annotations").is_dir() or (path.suffix == ".txt" and path.is_file()):
        return read_voc(path, images)
    inside = sorted(path.glob("*.json")) if path.is_dir() else []
    if len(inside) == 1:
        return read_coco(inside[0], images, masks=masks)
    raise DataError(
        f"{path}: no annotations found; allowed: a COCO file (.json) or a folder with one, a Pascal VOC folder (with "
        "Annotations and JPEGImages) or a list in its ImageSets/Main (.txt)"
    )


def detection_rows(config: DetectionTaskConfig, datasets: Sequence[Annotations], *, augment: bool) -> Rows:
    """Return the rows of data sets with the same classes; detection.masks is on or off."""
    return Rows(
        blocks=datasets,
        meta=None,
        limit=0,
        builder=DetectionBatchBuilder(config, datasets, augment=augment),
        digests=[dataset.digest for dataset in datasets],
    )


def select_learned(config: DetectionTaskConfig, datasets: Sequence[Annotations]) -> list[npt.NDArray[np.bool_]]:
    """Return masks [n] of the images to train on."""
    counts = [dataset.counts() for dataset in datasets]
    if not any((objects > 0).any() for objects in counts):
        raise RefusedError(f"{datasets[0].path}: no image has an object; expected: training images with objects")
    kept = config.detection.without_objects == "kept"
    return [np.ones(len(objects), dtype=np.bool_) if kept else objects > 0 for objects in counts]


def training_notices(config: DetectionTaskConfig, datasets: Sequence[Annotations]) -> list[str]:
    """Return notices about skipped objects and images of the training data."""
    counts = np.concatenate([dataset.counts() for dataset in datasets])
    notices = [notice for dataset in datasets for notice in dataset.notices()]
    most = config.detection.max_objects
    if cut := int((counts > most).sum()):
        notices.append(f"{cut} images have more than --detection.max_objects {most} objects; further ones are skipped")
    if config.detection.without_objects == "left_out" and (empty := int((counts == 0).sum())):
        notices.append(f"{empty} training images without objects are skipped (see --detection.without_objects)")
    return notices


LOSSES = {
    "rpn_objectness": "loss_objectness",
    "rpn_box": "loss_rpn_box_reg",
    "class": "loss_classifier",
    "box": "loss_box_reg",
    "mask": "loss_mask",
}
"""torchvision's name of each task's loss."""


class Detection(TaskObjective):
    """Objectness and boxes of proposals; classes, boxes and masks of objects (He et al. 2017, section 3).

    torchvision returns each loss as a mean over the samples of a micro-batch. A task's sum is this mean times the
    number of images, and its count is the number of images, so micro-batches are weighted by images.

    Results do not depend on the number of ranks, but on batch.micro_size: micro-batches have different numbers of
    samples, and the loop seeds torch's generator, which samples, for each micro-batch. Engines agree up to rounding
    until a rounding error changes which proposals are kept. Sampling synchronises host and device in each step.
    """

    regression: tuple[int, ...] = (1, 3)
    in_a_graph = False  # sampling synchronises with the host

    def __init__(self, *, masks: bool) -> None:
        self.tasks = tuple(task for task in LOSSES if masks or task != "mask")
        self.balanced = tuple(range(len(self.tasks)))
        self._pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of images without padding for each task, [T] float64."""
        return batch["row_weights"].double().sum().expand(len(self.tasks)).clone()

    def detections(self, forward: Callable[..., Any], batch: Batch) -> list[Target]:
        """Return the outputs of `Detector` for each row."""
        return forward(self._pixels(batch["images"]))  # type: ignore[no-any-return]

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Return the weighted losses of rows without padding; a batch of padding rows has losses x 0 of its first."""
        present = torch.nonzero(batch["row_weights"] > 0)[:, 0]
        rows = present if len(present) else present.new_zeros(1)
        losses = forward(self._pixels(batch["images"][rows]), targets(batch, rows.tolist()))
        counts = self.count(batch)
        means = torch.stack([losses[LOSSES[task]].double() for task in self.tasks])
        return TaskLosses(sums=means * counts, counts=counts)


def targets(batch: Batch, rows: list[int]) -> list[Target]:
    """Return the targets of `Detector` for some rows of a batch."""
    side, numbers = batch["images"].shape[-1], batch["counts"].tolist()
    listed = []
    for row in rows:
        boxes = batch["boxes"][row, : numbers[row]]  # [n, 4]
        target = {"boxes": boxes, "labels": batch["classes"][row, : numbers[row]]}
        if "masks" in batch.fields:
            shares = paste(batch["masks"][row, : numbers[row]] / 255.0, boxes, (side, side))  # [n, S, S]
            target["masks"] = (shares >= 0.5).to(torch.uint8)
        listed.append(target)
    return listed


class DetectionTask(ImageTask[DetectionTaskConfig]):
    """Object detection; see `DownstreamTask`. The metric is COCO's AP of boxes, or VOC 2007's for Pascal VOC."""

    objective: Detection

    def __init__(self, config: DetectionTaskConfig, environment: Environment) -> None:
        detection, test_path = config.detection, config.downstream.test_path
        paths, masks = parse_paths(config.data.path), detection.masks != "off"
        train = measured = open_detection(paths, detection.images, masks=masks)
        if test_path:
            measured = open_detection(parse_paths(test_path), detection.test_images, masks=masks)
            measured = [dataset.with_classes(train[0].classes) for dataset in measured]
        without = [dataset for dataset in (*train, *measured) if dataset.masks is None]
        if detection.masks == "on" and without:
            raise RefusedError(f"--detection.masks on: objects of {without[0].path} have no masks; allowed: auto, off")
        if detection.masks == "auto":
            detection.masks = "off" if without else "on"
        masks = detection.masks == "on"
        config.downstream.classes = len(train[0].classes)
        sources = open_task_sources(
            config,
            environment,
            detection_rows(config, train, augment=True),
            detection_rows(config, measured, augment=False),
            train_paths=paths,
            measured_paths=parse_paths(test_path) if test_path else None,
            learned=select_learned(config, train),
        )
        sources.notices += training_notices(config, train)
        sources.notices += [notice for dataset in measured if test_path for notice in dataset.notices()]
        super().__init__(config, sources)
        self._measured, self._speed = measured, InferenceSpeed()
        self.metric = VOC_METRIC if measured[0].voc else "AP"
        self.objective = Detection(masks=masks)

    def model(self) -> nn.Module:
        model = Detector(self.config)
        self.take_encoder(model)
        return model

    @classmethod
    def measure_on(cls, config: DetectionTaskConfig, checkpoint: Path, data: str, images: str) -> None:
        if data:
            config.detection.test_images = images
            if not has_training_data(config):
                config.detection.images = images
        super().measure_on(config, checkpoint, data, "")

    def predict(self, forward: Callable[..., Any], batch: Batch) -> list[Target]:
        """Return the detections of each row in pixels of its square."""
        with self._speed.measure(batch["images"]):
            return self.objective.detections(forward, batch)

    def metrics(self) -> DetectionMetrics:
        self._speed = InferenceSpeed()
        return DetectionMetrics(self._measured, self._speed)

    def predictions(self, directory: Path, group: Group) -> PredictedObjects:
        return PredictedObjects(directory / f"{self.name}.json", self._measured, group)
