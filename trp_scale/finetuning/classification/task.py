"""Image classification: end-to-end fine-tuning of an encoder with a linear head (He et al., A.1; TRP 001 Table 7;
AdPE A)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, agree_images, open_image_dataset
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import HeldOutPlan, Plan, TrainPlan
from trp_scale.data.sources import Chosen, Rows, TrainSource
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.finetuning.classification.batch import MeasuredImages, TrainingImages
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.groups import Groups, image_groups, read_group_file
from trp_scale.finetuning.measurement import (
    GatheredRows,
    Metrics,
    all_blocks,
    image_keys,
    image_names,
    label_ranks,
    read_once,
    unique_names,
    write_table,
)
from trp_scale.finetuning.task import (
    ImageTask,
    TaskObjective,
    image_step_flops,
    open_task_sources,
    select_training_blocks,
)
from trp_scale.models.initialise import initial_tensor, initialise_vision
from trp_scale.models.patches import Pixels
from trp_scale.models.vit import ImageEncoder, OnImageEncoder
from trp_scale.reporting.results import CONSTANT

MOST_FREQUENT = "most_frequent_class"
"""Key in a checkpoint: number of the most frequent class of the training images."""


class ClassificationTask(ImageTask[ClassificationTaskConfig]):
    """Image classification; see `DownstreamTask`."""

    objective: ImageClassification
    metric = "accuracy"
    pictures = "trp_scale.evaluation.figures.finetuned:draw_classifiers"

    def __init__(self, config: ClassificationTaskConfig, environment: Environment) -> None:
        test_path = config.downstream.test_path
        train = open_labelled(config, config.data.path)
        measured = open_labelled(config, test_path) if test_path else train
        config.downstream.classes = len(train.classes)
        if train.meta.classes is not None and measured.meta.classes not in (None, train.meta.classes):
            raise RefusedError(
                f"--downstream.test_path has {len(measured.classes)} classes ({', '.join(measured.classes[:3])}, ...), "
                f"--data.path {len(train.classes)} ({', '.join(train.classes[:3])}, ...); allowed: the same names in "
                "the same order"
            )
        if len(measured.classes) > len(train.classes):
            raise RefusedError(
                f"--downstream.test_path has images of class {len(measured.classes) - 1}, --data.path has "
                f"{len(train.classes)} classes, from 0; allowed: the same classes"
            )
        groups, rows = None, train.rows(config, TrainingImages)
        measured_rows = measured.rows(config, MeasuredImages)
        if source := config.downstream.groups:
            names, measured_names = train.groups(source), measured.groups(source)
            groups = Groups.from_names(source, config.downstream.least_group, *names, *measured_names)
            rows, measured_rows = groups.attach(rows, names), groups.attach(measured_rows, measured_names)
        sources = open_task_sources(
            config,
            environment,
            rows,
            measured_rows,
            train_paths=train.paths,
            measured_paths=measured.paths if test_path else None,
            groups=groups,
        )
        super().__init__(config, sources)
        self.classes = train.classes
        self._measured = measured.datasets
        self.constant: int | None = train.most_frequent(0.0 if test_path else config.data.validation_fraction)
        self.objective = ImageClassification()
        self.use_groups(groups, self.objective)

    @cached_property
    def step_flops(self) -> float:
        return image_step_flops(self.config, partial(ImageClassifier, self.config))

    def model(self) -> nn.Module:
        model = ImageClassifier(self.config)
        self.take_encoder(model, last_norm=model.fc_norm is None)
        return model

    def predict(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Return logits [R, C]."""
        return self.objective.logits(forward, batch)

    def metrics(self) -> Metrics:
        return self.report_groups(Accuracy(self.classes, self.constant))

    def restore_extra(self, extra: Mapping[str, Any]) -> None:
        self.constant = extra.get(MOST_FREQUENT)

    def predictions(self, directory: Path, group: Group) -> PredictedClasses:
        path = directory / f"{self.name}.csv"
        return PredictedClasses(path, self.classes, self.measured_plan, self._measured, group)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"classes": list(self.classes), MOST_FREQUENT: self.constant}


class PredictedClasses:
    """Writes a CSV file with a line for each image: key, number and name of the predicted class, its probability, and
    the true class, empty if unknown; see `Predictions`."""

    columns = ("key", "predicted", "class", "probability", "label")

    def __init__(
        self, path: Path, classes: Sequence[str], plan: Plan, datasets: Sequence[ImageDataset], group: Group
    ) -> None:
        self._path, self._classes, self._plan, self._datasets = path, classes, plan, datasets
        self._group, self._rows = group, GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add logits [R, C]."""
        probability, predicted = outputs.float().softmax(1).max(1)  # [R]
        self._rows.add(batch, predicted=predicted, probability=probability, labels=batch["labels"])

    def finish(self) -> list[Path]:
        rows = self._rows.gather(self._group)

        def write() -> None:
            names = image_names(self._plan, self._datasets)
            columns = zip(names, *(rows[name].tolist() for name in ("predicted", "probability", "labels")), strict=True)
            lines = (
                (name, number, self._classes[number], f"{share:.6f}", "" if label < 0 else label)
                for name, number, share, label in columns
            )
            write_table(self._path, self.columns, lines, separator=",")

        on_rank_zero(self._group, f"writing {self._path}", write)
        return [self._path]


class Accuracy:
    """Top-1, top-5 and per-class accuracy, and that of always predicting the class `constant`; see `Metrics`."""

    def __init__(self, classes: tuple[str, ...], constant: int | None = None) -> None:
        self._classes, self._constant = classes, constant
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        self._rows.add(batch, ranks=label_ranks(outputs, batch["labels"].clamp(min=0)), labels=batch["labels"])

    def finish(self, group: Group) -> dict[str, Any]:
        rows = self._rows.gather(group)
        right, labels = rows["ranks"] == 0, rows["labels"]
        figures: dict[str, Any] = {"accuracy": float(right.mean())}
        if len(self._classes) >= 10:
            figures["accuracy_top5"] = float((rows["ranks"] < 5).mean())
        if self._constant is not None:
            figures[f"{CONSTANT}accuracy"] = float((labels == self._constant).mean())
        images = np.bincount(labels, minlength=len(self._classes)).tolist()
        hits = np.bincount(labels[right], minlength=len(self._classes)).tolist()
        figures["detail"] = {
            "classes": {
                name: {"accuracy": hit / count if count else None, "images": count}
                for name, hit, count in zip(unique_names(self._classes), hits, images, strict=True)
            }
        }
        return figures


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Opened data sets of images with classes.

    Attributes:
        config: image transform (crops, augmentation) and batches of `batches` and `random_crops`.
        paths, datasets: of the mixture's members.
        meta: shared by the members.
        classes: names, or numbers if the data sets have no names.
    """

    config: ClassificationTaskConfig
    paths: list[MemberPath]
    datasets: list[ImageDataset]
    meta: ImageMeta
    classes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of all images and classes."""
        return " ".join(dataset.digest() for dataset in self.datasets)

    def held_blocks(self, fraction: float) -> list[Chosen]:
        """Return [blocks] of each data set that are held out for this data.validation_fraction."""
        blocks = [dataset.blocks for dataset in self.datasets]
        return [~mask for mask in select_training_blocks(blocks, self.paths, fraction)]

    def held_out(self, fraction: float) -> npt.NDArray[np.bool_]:
        """Return [n] which images are held out, in stored order."""
        pairs = zip(self.held_blocks(fraction), self.datasets, strict=True)
        return np.concatenate([np.repeat(mask, dataset.blocks.rows) for mask, dataset in pairs])

    def labels(self, chosen: Sequence[Chosen]) -> npt.NDArray[np.int64]:
        """Return the classes [n] of the images in these blocks, in stored order."""
        pairs = zip(self.datasets, chosen, strict=True)
        return np.concatenate([data.samples.labels[np.repeat(mask, data.blocks.rows)] for data, mask in pairs])

    def most_frequent(self, fraction: float) -> int:
        """Return the most frequent class of the images that are not held out; ties go to the lower class."""
        labels = self.labels([~held for held in self.held_blocks(fraction)])
        return int(np.bincount(labels, minlength=len(self.classes)).argmax())

    def groups(self, source: str) -> list[list[str]]:
        """Return the group of each image in stored order, for each data set; see `image_groups`."""
        rows = read_group_file(source)
        return [
            image_groups(rows, image_keys(dataset), dataset.samples.labels, self.classes, source)
            for dataset in self.datasets
        ]

    def rows(self, config: ClassificationTaskConfig, kind: type[TrainingImages] | type[MeasuredImages]) -> Rows:
        """Return all rows, with a batch builder of this kind; downstream.classes sets the length of its targets."""
        labels = [np.asarray(dataset.samples.labels, dtype=np.int64) for dataset in self.datasets]
        return Rows.from_datasets(self.datasets, self.meta, kind(config, self.datasets, self.meta), labels)

    def _copy_config(self) -> ClassificationTaskConfig:
        config = copy.deepcopy(self.config)
        config.downstream.classes = len(self.classes)
        return config

    def batches(self, group: Group, chosen: Sequence[Chosen] | None = None) -> Iterator[Batch]:
        """Return this rank's micro-batches of the images in the chosen blocks, by default all: each once and in stored
        order; padding rows have row_weights 0."""
        rows = self.rows(self._copy_config(), MeasuredImages)
        plan = HeldOutPlan(members=rows.members(self.paths, chosen or all_blocks(rows.blocks)))
        return read_once(rows, plan, self.config, group)

    def random_crops(self, group: Group, fraction: float, *, smallest: float, batch: int, seed: int) -> TrainSource:
        """Return an endless source of random crops, flipped half of the time, of the images that are not held out, in
        training order.

        Args:
            smallest: smallest area of a crop relative to the image.
            batch: images per batch, over all ranks.
            seed: for order and crops.
        """
        config = self._copy_config()
        config.crops.min_scale, config.crops.max_scale, config.crops.flip = smallest, 1.0, 0.5
        config.batch.global_size, config.training.seed = batch, seed
        rows = self.rows(config, TrainingImages)
        plan = TrainPlan(
            seed=seed,
            members=rows.members(self.paths, [~mask for mask in self.held_blocks(fraction)]),
            blocks_per_group=config.data.blocks_per_group,
        )
        flags = ("linear.batch_size", "batch_size")
        return TrainSource(plan, rows.builder, config, rank=group.rank, world=group.size, pin_memory=False, flags=flags)


def open_labelled(config: ClassificationTaskConfig, path: str) -> LabelledImages:
    """Open a data set of images with classes, or a mixture.

    Raises:
        DataError: it is missing, damaged or of another format, or its members differ.
        RefusedError: the images have no classes.
    """
    paths = parse_paths(path)
    datasets = [open_image_dataset(member.path, member.name) for member in paths]
    meta = agree_images(datasets)
    if "cls" not in meta.suffixes:
        raise RefusedError(f"{path}: the images have no classes (no .cls members), which classification needs")
    classes = meta.classes
    if classes is None:
        highest = max(int(dataset.samples.labels.max()) for dataset in datasets)
        classes = tuple(str(number) for number in range(1 + highest))
    return LabelledImages(config=config, paths=paths, datasets=datasets, meta=meta, classes=classes)


class ImageClassification(TaskObjective):
    """Mean over images of the cross-entropy with the batch's targets."""

    tasks: tuple[str, ...] = ("classification",)

    def __init__(self) -> None:
        self._pixels = Pixels()

    def logits(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Return logits [R, C] for a batch's images [R, 3, S, S] uint8."""
        return forward(self._pixels(batch["images"]))

    def __call__(self, forward: Callable[..., Tensor], batch: Batch) -> TaskLosses:
        """Return the sum of losses over images, in float64."""
        logits = self.logits(forward, batch)
        losses = F.cross_entropy(logits.float(), batch["targets"], reduction="none")  # [R]
        return self.sum_rows(losses, batch)


class ImageClassifier(OnImageEncoder):
    """Encoder, pooling (mean of the patch tokens, or class token), norm, dropout and a linear layer.

    With mean pooling the encoder has no last norm; `fc_norm` normalises the mean (He et al., A.1). It starts at weight
    1 and bias 0: the encoder's last norm was trained on single tokens, and their mean has another variance.
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
        with torch.no_grad():  # all classes start equally likely; MAE also truncates at 2, which is 100,000 deviations
            shape = (config.downstream.classes, width)
            self.head.weight.copy_(initial_tensor(config.training.seed, "head.weight", shape, 2e-5))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for normalised pixels [B, 3, S, S]."""
        tokens = self.encoder(images)[0]  # [B, 1 + N, D]
        pooled = tokens[:, 0] if self.fc_norm is None else self.fc_norm(tokens[:, 1:].mean(1))  # [B, D]
        return self.head(self.dropout(pooled))  # type: ignore[no-any-return]
