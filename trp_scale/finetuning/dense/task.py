"""Shared parts of the tasks of pixels: opening images with one map, jittered to learn from, whole to measure on; the
model; and its predictions for whole images, joined from those for an image's windows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, RowReader, agree_images, open_image_dataset
from trp_scale.data.images.formats import Map, write_png
from trp_scale.data.images.maps import map_formats, stored_maps
from trp_scale.data.index import read_json
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import Addresses, Plan
from trp_scale.data.sources import Rows
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.errors import DataError
from trp_scale.finetuning.dense.batch import DepthMaps, JitteredBatchBuilder, SegmentationMaps, WholeBatchBuilder
from trp_scale.finetuning.dense.model import PixelModel
from trp_scale.finetuning.dense.settings import DenseTaskConfig
from trp_scale.finetuning.task import ImageTask, image_names, image_step_flops, open_task_sources, rows_from_images
from trp_scale.models.patches import Pixels

DenseMaps = SegmentationMaps | DepthMaps


@dataclass(frozen=True, kw_only=True)
class DenseData:
    """Opened data sets with one map for each image.

    Attributes:
        datasets: members of the mixture.
        meta: what they have in common.
        maps: how their maps are read.
    """

    datasets: list[ImageDataset]
    meta: ImageMeta
    maps: DenseMaps

    def rows(self, config: DenseTaskConfig, *, whole: bool) -> Rows:
        """Their rows, as jittered crops or as whole images."""
        kind = WholeBatchBuilder if whole else JitteredBatchBuilder
        return rows_from_images(self.datasets, self.meta, kind(config, self.datasets, self.meta, self.maps))


def open_dense(config: DenseTaskConfig, paths: Sequence[MemberPath], kind: type[DenseMaps]) -> DenseData:
    """Open data sets that trp-scale shard-images wrote with maps.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: images without such maps, a folder that is not sharded yet, or settings that do not fit them.
    """
    for path in paths:
        _check(path, kind)
    datasets = [open_image_dataset(path.path, path.name, (kind.name,)) for path in paths]
    return DenseData(datasets=datasets, meta=agree_images(datasets), maps=kind.from_datasets(datasets, config.dense))


def _check(path: MemberPath, kind: type[DenseMaps]) -> None:
    """Refuse what is no data set with such maps, with the command that makes one."""
    name = kind.name
    command = (
        f"trp-scale shard-images --inputs IMAGES --modality {name}=MAPS {kind.sharded_with} --output DATA, then "
        "--data.path DATA"
    )
    document = path.path / "dataset.json"
    if path.path.is_dir() and not document.is_file():
        raise RefusedError(f"{path.path}: no dataset.json, so these are not shards yet; make them: {command}")
    try:
        stored = stored_maps(document, read_json(document))
    except DataError as error:
        raise DataError(f"{error}; images with maps are made with {command}") from error
    if name not in stored:
        names = ", ".join(["images", *stored])
        raise RefusedError(f"{path.path} has {names} only, --downstream.kind needs {name} maps; make them: {command}")
    map_formats()[name].require(document, stored[name])


def depth_statistics(data: DenseData, addresses: Addresses, *, inverse: bool) -> tuple[float, float]:
    """Mean and standard deviation of the measured pixels of some maps.

    Args:
        data: with maps of depth.
        addresses: of the rows.
        inverse: of 1 / depth in place of depth.

    Raises:
        DataError: none of these maps has a measured pixel.
    """
    assert isinstance(data.maps, DepthMaps)
    rows = RowReader(data.datasets, data.meta, verify=False).read(addresses)
    count, total, squares = 0, 0.0, 0.0
    for sample, member in zip(rows.samples, addresses.member.tolist(), strict=True):
        if sample is not None:
            depth = data.maps.read(sample, member).astype(np.float64)
            values = depth[depth > 0]
            values = 1 / values if inverse else values
            count, total, squares = count + len(values), total + float(values.sum()), squares + float(values @ values)
    if count == 0:
        raise DataError(
            f"{data.datasets[0].directory}: no depth from --dense.min_depth to --dense.max_depth in the first "
            f"{len(rows.samples)} training images"
        )
    mean = total / count
    return mean, float(np.sqrt(max(squares / count - mean**2, 0.0))) or 1.0


Numbers = Callable[[Tensor, int], Map]
"""From what was predicted of an image [H, W], and the number of its data set in the mixture, to what is stored."""


class PredictedMaps:
    """DIRECTORY/KEY.png, one for each image; see `Predictions`. They are written batch by batch: there may be many.

    Args:
        directory: for the files.
        numbers: of a map.
        plan: of the measured rows.
        datasets: that they are of.
        group: ranks that predict.
    """

    def __init__(
        self, directory: Path, numbers: Numbers, plan: Plan, datasets: Sequence[ImageDataset], group: Group
    ) -> None:
        self._directory, self._numbers, self._plan, self._group = directory, numbers, plan, group
        self._names = on_rank_zero(group, "reading the keys of the images", lambda: image_names(plan, datasets))

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Each row's prediction [H, W]."""
        members = self._plan.locate(np.arange(batch.start, batch.start + len(outputs))).member.tolist()
        encoded = [
            (batch.start + row, write_png(self._numbers(output, member)))
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
    """Data and model of a task of pixels; what is learned and measured is the subclass's."""

    maps: type[DenseMaps]
    pictures = "trp_scale.evaluation.figures.pixel_pictures:draw_pixel_maps"

    def __init__(self, config: DenseRun, environment: Environment) -> None:
        self.config = config
        paths = parse_paths(config.data.path)
        test_path = config.downstream.test_path
        test_paths = parse_paths(test_path) if test_path else None
        data = open_dense(config, paths, self.maps)
        test = data if test_paths is None else open_dense(config, test_paths, self.maps)
        self._outputs, self._measured = self.complete(data, test), test
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

    @abstractmethod
    def complete(self, data: DenseData, measured: DenseData) -> int:
        """Write the settings that follow from the data into the configuration; returns the model's outputs.

        Args:
            data: to learn from.
            measured: what is measured, which may be the same.

        Raises:
            RefusedError: the two do not fit each other.
        """

    def predictions(self, directory: Path, group: Group) -> PredictedMaps:
        return PredictedMaps(directory / self.name, self.numbers, self.measured_plan, self._measured.datasets, group)

    @abstractmethod
    def numbers(self, predicted: Tensor, member: int) -> Map:
        """Convert a prediction to the numbers of the measured data's own maps, [H, W] uint8 or uint16.

        Args:
            predicted: [H, W] as `predict` gives it.
            member: number of the data set in the measured mixture.
        """

    def model(self) -> nn.Module:
        model = PixelModel(self.config, self._outputs)
        self.take_encoder(model)
        return model

    @cached_property
    def step_flops(self) -> float:
        return image_step_flops(self.config, partial(PixelModel, self.config, self._outputs))


def predict_whole(forward: Callable[..., list[Tensor]], pixels: Pixels, batch: Batch) -> Iterator[Tensor]:
    """Each image's prediction at its stored size, [C, H, W] float32, in the order of the rows.

    The windows of all images go through the model in one pass, so every rank makes as many passes, as sharded engines
    need. Where windows overlap their predictions are averaged.

    Args:
        forward: the model, [B, 3, S, S] -> a list whose first item is [B, C, S, S].
        pixels: bytes into normalised pixels.
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
    """[K, C, S, S] at K corners -> [C, H, W] of the scaled image, the mean where windows overlap."""
    size = windows.shape[-1]
    total = windows.new_zeros(windows.shape[1], *scaled)
    times = windows.new_zeros(scaled)
    for window, (top, left) in zip(windows, corners, strict=False):
        total[:, top : top + size, left : left + size] += window
        times[top : top + size, left : left + size] += 1
    return total / times
