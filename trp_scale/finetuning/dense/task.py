"""Dense prediction: data and model of segmentation and depth, sliding-window inference, and segmentation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import read_given_weights, reading
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext
from trp_scale.data.images.dataset import ImageDataset, agree_images, open_image_dataset
from trp_scale.data.images.formats import Map, write_png
from trp_scale.data.images.maps import map_formats, stored_maps
from trp_scale.data.index import read_json
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import Plan
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.errors import DataError
from trp_scale.finetuning.dense.batch import DenseData, DenseMaps, SegmentationMaps
from trp_scale.finetuning.dense.model import PixelModel, load_multimae_head
from trp_scale.finetuning.dense.settings import DenseTaskConfig, SegmentationTaskConfig
from trp_scale.finetuning.measurement import image_names, unique_names
from trp_scale.finetuning.task import ImageTask, TaskObjective, image_step_flops, open_task_sources
from trp_scale.models.batch_norm import RunningStatistics
from trp_scale.models.patches import Pixels
from trp_scale.pretraining.modalities.semseg import VOID
from trp_scale.reporting.results import CONSTANT


def open_dense(config: DenseTaskConfig, paths: Sequence[MemberPath], kind: type[DenseMaps]) -> DenseData:
    """Open data sets that trp-scale shard-images wrote with maps.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: the images have no such maps, are not sharded, or do not fit the settings.
    """
    command = (
        f"trp-scale shard-images --inputs IMAGES --modality {kind.name}=MAPS {kind.sharded_with} --output DATA, then "
        "--data.path DATA"
    )
    for path in (member.path for member in paths):
        document = path / "dataset.json"
        if path.is_dir() and not document.is_file():
            raise RefusedError(f"{path}: no dataset.json, so the folder is not sharded; create shards with {command}")
        try:
            stored = stored_maps(document, read_json(document))
        except DataError as error:
            raise DataError(f"{error}; create images with maps with {command}") from error
        if kind.name not in stored:
            raise RefusedError(
                f"{path} has only {', '.join(['images', *stored])}; --downstream.kind needs {kind.name} maps; create "
                f"them: {command}"
            )
        map_formats()[kind.name].require(document, stored[kind.name])
    datasets = [open_image_dataset(path.path, path.name, (kind.name,)) for path in paths]
    return DenseData(datasets=datasets, meta=agree_images(datasets), maps=kind(datasets, config.dense))


class PredictedMaps:
    """Writes DIRECTORY/KEY.png for each image, batch by batch; see `Predictions`. `convert`: `to_stored_map`."""

    def __init__(
        self,
        directory: Path,
        convert: Callable[[Tensor, int], Map],
        plan: Plan,
        datasets: Sequence[ImageDataset],
        group: Group,
    ) -> None:
        self._directory, self._convert, self._plan, self._group = directory, convert, plan, group
        self._names = on_rank_zero(group, "reading the keys of the images", lambda: image_names(plan, datasets))

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Write each row's prediction [H, W]."""
        members = self._plan.locate(np.arange(batch.start, batch.start + len(outputs))).member.tolist()
        encoded = [
            (batch.start + row, write_png(self._convert(output, member)))
            for row, (output, member, weight) in enumerate(
                zip(outputs, members, batch["row_weights"].tolist(), strict=True)
            )
            if weight > 0
        ]
        gathered = self._group.gather_objects(encoded)

        def write() -> None:
            for position, content in (item for part in gathered for item in part):
                path = self._directory / f"{self._names[position]}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

        on_rank_zero(self._group, f"writing {self._directory}", write)

    def finish(self) -> list[Path]:
        return [self._directory]


DenseRun = TypeVar("DenseRun", bound=DenseTaskConfig)


class DenseTask(ImageTask[DenseRun]):
    """Data and model of dense prediction; subclasses define objective and metrics."""

    maps: type[DenseMaps]
    pictures = "trp_scale.evaluation.figures.finetuned:draw_pixel_maps"

    def __init__(self, config: DenseRun, environment: Environment) -> None:
        self.config = config
        paths = parse_paths(config.data.path)
        test_path = config.downstream.test_path
        test_paths = parse_paths(test_path) if test_path else None
        data = open_dense(config, paths, self.maps)
        test = data if test_paths is None else open_dense(config, test_paths, self.maps)
        self._outputs, self._measured = self.derive_settings(data, test), test
        super().__init__(
            config,
            open_task_sources(
                config,
                environment,
                data.rows(config, whole=False),
                test.rows(config, whole=True),
                train_paths=paths,
                measured_paths=test_paths,
            ),
        )

    @classmethod
    def measure_on(cls, config: DenseRun, checkpoint: Path, data: str, images: str) -> None:
        super().measure_on(config, checkpoint, data, images)
        config.dense.weights = ""

    @abstractmethod
    def derive_settings(self, data: DenseData, measured: DenseData) -> int:
        """Set the settings that follow from training and measured data; returns C, the model's output channels.

        Raises:
            RefusedError: the data sets do not fit each other or the settings.
        """

    def predictions(self, directory: Path, group: Group) -> PredictedMaps:
        return PredictedMaps(
            directory / self.name, self.to_stored_map, self.measured_plan, self._measured.datasets, group
        )

    @abstractmethod
    def to_stored_map(self, predicted: Tensor, member: int) -> Map:
        """Convert a prediction [H, W] to the numbers of maps of data set `member`, [H, W] uint8 or uint16."""

    def model(self) -> nn.Module:
        model = PixelModel(self.config, self._outputs)
        self.take_encoder(model)
        if path := self.config.dense.weights:
            source = read_given_weights(path, "--dense.weights")
            with reading(source.where):
                load_multimae_head(model.head, source.tensors, self.maps.name)
        return model

    def hooks(self, run: RunContext) -> list[Hook]:
        return [RunningStatistics(run)] if self.config.dense.norm == "batch" else []

    @cached_property
    def step_flops(self) -> float:
        return image_step_flops(self.config, partial(PixelModel, self.config, self._outputs))


def predict_whole(forward: Callable[..., list[Tensor]], pixels: Pixels, batch: Batch) -> Iterator[Tensor]:
    """Yield each image's prediction at its stored size, [C, H, W] float32; predictions of windows are averaged.

    One forward pass computes the windows of all images: with sharded engines all ranks must run equally many passes.

    Args:
        forward: model [B, 3, S, S] -> list with first item [B, C, S, S].
        pixels: normalisation of pixels.
        batch: of `WholeBatchBuilder`.
    """
    counts = batch["window_counts"]
    present = torch.arange(batch["windows"].shape[1], device=counts.device) < counts[:, None]  # [R, K]
    outputs = forward(pixels(batch["windows"][present]))[0].float()  # [windows, C, S, S]
    parts = zip(
        torch.split(outputs, counts.tolist()),
        batch["window_corners"].tolist(),
        batch["scaled_sizes"].tolist(),
        batch["sizes"].tolist(),
        strict=True,
    )
    for windows, corners, scaled, size in parts:
        whole = join_windows(windows, corners, tuple(scaled))
        yield F.interpolate(whole[None], size=tuple(size), mode="bilinear", align_corners=False)[0]


def join_windows(windows: Tensor, corners: list[list[int]], scaled: tuple[int, int]) -> Tensor:
    """Average overlapping windows [K, C, S, S] at K corners to a map [C, H, W] of the scaled image."""
    size = windows.shape[-1]
    total = windows.new_zeros(windows.shape[1], *scaled)
    times = windows.new_zeros(scaled)
    for window, (top, left) in zip(windows, corners, strict=False):
        total[:, top : top + size, left : left + size] += window
        times[top : top + size, left : left + size] += 1
    return total / times


class SegmentationTask(DenseTask[SegmentationTaskConfig]):
    """Semantic segmentation; see `DownstreamTask`."""

    objective: Segmentation
    metric = "mean_iou"
    maps = SegmentationMaps

    def __init__(self, config: SegmentationTaskConfig, environment: Environment) -> None:
        super().__init__(config, environment)
        self.objective = Segmentation(config.dense.auxiliary_weight)

    def derive_settings(self, data: DenseData, measured: DenseData) -> int:
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
        """Return the predicted classes of each whole image, [H, W] int64."""
        return [logits.argmax(0) for logits in predict_whole(forward, self.objective.pixels, batch)]

    def to_stored_map(self, predicted: Tensor, member: int) -> Map:
        """Return class numbers of the stored maps."""
        stored: Map = self._stored[predicted.cpu().numpy()]
        return stored

    def metrics(self) -> ConfusionMatrix:
        return ConfusionMatrix(self.classes)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}


class Segmentation(TaskObjective):
    """Mean cross-entropy over all labelled pixels, plus that of an auxiliary head times `auxiliary_weight`."""

    tasks: tuple[str, ...] = ("segmentation",)

    def __init__(self, auxiliary_weight: float = 0.0) -> None:
        self._weights = (1.0, auxiliary_weight)
        self.pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of labelled pixels, [1] float64."""
        return (batch["semseg"] != VOID).sum().double().reshape(1)

    def __call__(self, forward: Callable[..., list[Tensor]], batch: Batch) -> TaskLosses:
        """Return the sum of losses over labelled pixels; padding rows are void."""
        labels = batch["semseg"].long()  # [R, S, S]
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for weight, logits in zip(self._weights, forward(self.pixels(batch["images"])), strict=False):
            losses = F.cross_entropy(logits.float(), labels, ignore_index=VOID, reduction="none")  # [R, S, S]
            total = total + weight * losses.sum(dtype=torch.float64)
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))


class ConfusionMatrix:
    """ConfusionMatrix matrix over pixels; see `Metrics`. Counts are integers, so metrics do not depend on the number of
    ranks."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self._counts: Tensor | None = None

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Add each row's predicted classes [H, W]; labels of padding rows are void."""
        size = len(self._classes)
        for row, (predicted, (height, width)) in enumerate(zip(outputs, batch["sizes"].tolist(), strict=True)):
            labels = batch["whole_semseg"][row, :height, :width].long()
            labelled = labels < size  # void is 255
            pairs = labels[labelled] * size + predicted[labelled].long()
            counts = torch.bincount(pairs, minlength=size**2).view(size, size)
            self._counts = counts if self._counts is None else self._counts + counts

    def finish(self, group: Group) -> dict[str, Any]:
        assert self._counts is not None  # every rank has micro-batches, if only of padding rows
        return segmentation_metrics(group.sum(self._counts).cpu(), self._classes)


def segmentation_metrics(counts: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of a confusion matrix.

    mean_iou: mean over classes of intersection / union, without classes that are neither labelled nor predicted.
    pixel_accuracy: accuracy over labelled pixels. class_accuracy: mean over labelled classes of their accuracy.
    constant_mean_iou: mean_iou of predicting the most frequent class everywhere.

    Args:
        counts: [C, C] integers, labels x predictions.
        classes: names.

    Raises:
        RefusedError: no pixel has a label.
    """
    counts = counts.double()  # exact up to 2^53 pixels
    labelled, predicted, right = counts.sum(1), counts.sum(0), counts.diagonal()
    if not labelled.sum():
        raise RefusedError(
            "every measured pixel is void; check the label maps, --dense.ignored and --downstream.test_path"
        )
    union = labelled + predicted - right
    iou, accuracy = right / union, right / labelled  # NaN for classes without pixels
    names = unique_names(classes)
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
