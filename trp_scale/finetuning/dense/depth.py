"""Depth estimation (TRP 4.2.3 and Table 7: NYUv2), with the reverse Huber loss (Laina et al. 2016, eq. 2) and the
metrics of Eigen et al. 2014 (TRP 4.3.2 reports delta_1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.data.images.dataset import RowReader
from trp_scale.data.images.formats import Map
from trp_scale.data.mixture import parse_paths
from trp_scale.data.plan import TrainPlan
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError
from trp_scale.finetuning.dense.batch import DenseData, DepthMaps
from trp_scale.finetuning.dense.settings import DepthTaskConfig
from trp_scale.finetuning.dense.task import DenseTask, predict_whole
from trp_scale.finetuning.measurement import GatheredRows
from trp_scale.finetuning.task import TaskObjective, select_training_blocks
from trp_scale.models.patches import Pixels
from trp_scale.pretraining.modalities.depth import LARGEST as LARGEST_NUMBER
from trp_scale.reporting.results import CONSTANT


class DepthTask(DenseTask[DepthTaskConfig]):
    """Depth estimation; see `DownstreamTask`."""

    objective: DepthObjective
    metric = "delta_1"
    maps = DepthMaps

    def __init__(self, config: DepthTaskConfig, environment: Environment) -> None:
        super().__init__(config, environment)
        dense = config.dense
        self.space = DepthSpace(
            inverse=self._inverted,
            mean=dense.depth_mean,
            deviation=dense.depth_deviation,
            low=dense.min_depth,
            high=dense.max_depth or math.inf,
        )
        self.objective = DepthObjective(self.space, dense.threshold)

    def hooks(self, run: RunContext) -> list[Hook]:
        return super().hooks(run) + ([LargestError(self.objective)] if self.config.dense.threshold == "batch" else [])

    def derive_settings(self, data: DenseData, measured: DenseData) -> int:
        maps, dense = data.maps, self.config.dense
        assert isinstance(maps, DepthMaps) and isinstance(measured.maps, DepthMaps)
        path, test_path = self.config.data.path, self.config.downstream.test_path or self.config.data.path
        if maps.nearer and dense.target == "metric":
            raise RefusedError(
                f"{path} has inverse depth maps (larger numbers are nearer), but --dense.target is metric; allowed: "
                "--dense.target inverse"
            )
        if maps.nearer is not measured.maps.nearer:
            raise RefusedError(
                f"larger_is in dataset.json differs between {test_path} and {path}; allowed: the same direction"
            )
        for target, where in ((maps, path), (measured.maps, test_path)):
            if not target.metric and dense.alignment == "none":
                raise RefusedError(
                    f"{where} has relative depth maps (scale null in dataset.json), for which unaligned errors mean "
                    "nothing; allowed: --dense.alignment scale_shift, or shard again with --depth.scale"
                )
        self._inverted, self._units = dense.target == "inverse" and not maps.nearer, measured.maps.units
        if dense.depth_deviation == 0:
            dense.depth_mean, dense.depth_deviation = self._statistics(data)
        return 1

    def _statistics(self, data: DenseData) -> tuple[float, float]:
        """Return mean and deviation of the first 256 maps in training order, which is the same on all ranks."""
        config = self.config
        paths, rows = parse_paths(config.data.path), data.rows(config, whole=False)
        fraction = 0.0 if config.downstream.test_path else config.data.validation_fraction
        plan = TrainPlan(
            seed=config.training.seed,
            members=rows.members(paths, select_training_blocks(rows.blocks, paths, fraction)),
            blocks_per_group=config.data.blocks_per_group,
        )
        addresses = plan.locate(np.arange(min(256, plan.rows)))
        samples = RowReader(data.datasets, data.meta, verify=False).read(addresses).samples
        count, total, squares = 0, 0.0, 0.0
        for sample, member in zip(samples, addresses.member.tolist(), strict=True):
            if sample is not None:
                depth = data.maps.read(sample, member).astype(np.float64)
                values = depth[depth > 0]
                values = 1 / values if self._inverted else values
                count += len(values)
                total += float(values.sum())
                squares += float(values @ values)
        if count == 0:
            raise DataError(
                f"{data.datasets[0].directory}: no depth from --dense.min_depth to --dense.max_depth in the first "
                f"{len(samples)} training images"
            )
        mean = total / count
        return mean, float(np.sqrt(max(squares / count - mean**2, 0.0))) or 1.0

    def predict(self, forward: Callable[..., list[Tensor]], batch: Batch) -> list[Tensor]:
        """Return predicted targets for each whole image, [H, W] float32; `space.depth` converts them to depth."""
        space = self.space
        return [
            space.mean + space.deviation * output[0] for output in predict_whole(forward, self.objective.pixels, batch)
        ]

    def to_stored_map(self, predicted: Tensor, member: int) -> Map:
        """Return unaligned depth in the unit of the stored maps, at least 1: 0 means not measured."""
        units = self.space.depth(predicted.double()).cpu().numpy() / self._units[member]
        stored: Map = np.clip(np.rint(np.nan_to_num(units, nan=1.0)), 1, LARGEST_NUMBER).astype(np.uint16)
        return stored

    def metrics(self) -> DepthErrors:
        dense = self.config.dense
        return DepthErrors(self.space, dense.alignment, dense.region)


LARGEST = Extra("largest_error")
"""Key in `Batch.extras`: largest error of the global batch, []."""


@dataclass(frozen=True, kw_only=True)
class DepthSpace:
    """Conversion between depth and the head's outputs.

    Attributes:
        inverse: targets are 1 / depth.
        mean, deviation: target = mean + deviation x output.
        low, high: limits of predicted depth.
    """

    inverse: bool
    mean: float
    deviation: float
    low: float
    high: float

    def target(self, depth: Tensor) -> Tensor:
        """Convert depth of any shape to targets; unknown depth 0 stays 0."""
        return torch.where(depth > 0, 1 / depth.clamp(min=1e-12), 0.0) if self.inverse else depth

    def depth(self, target: Tensor) -> Tensor:
        """Convert targets to depth within the limits."""
        depth = 1 / target.clamp(min=1e-12) if self.inverse else target
        return depth.clamp(self.low, self.high)


class DepthObjective(TaskObjective):
    """Mean over all measured pixels of the reverse Huber loss on standardised targets.

    The threshold c is a fifth of the largest error of the image. Laina et al. and MultiMAE's code use the largest error
    of the batch. With dense.threshold batch, `LargestError` computes that of the global batch before the step, so the
    loss does not depend on how the batch is split.
    """

    tasks: tuple[str, ...] = ("depth",)
    regression = (0,)

    def __init__(self, space: DepthSpace, threshold: Literal["image", "batch"] = "image") -> None:
        self._space, self._per_image = space, threshold == "image"
        self.pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of measured pixels, [1] float64."""
        return (batch["depth"] > 0).sum().double().reshape(1)

    def __call__(self, forward: Callable[..., list[Tensor]], batch: Batch) -> TaskLosses:
        """Return the sum of losses over measured pixels."""
        errors = self.errors(forward, batch)
        largest = None if self._per_image else batch.extras.get(LARGEST, errors.detach().abs().max())
        total = reverse_huber(errors, largest).sum(dtype=torch.float64)
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))

    def errors(self, forward: Callable[..., list[Tensor]], batch: Batch) -> Tensor:
        """Return errors [R, S, S] float32 in standardised units; 0 where depth is unknown."""
        depth = batch["depth"]  # [R, S, S]
        outputs = forward(self.pixels(batch["images"]))[0].squeeze(1).float()  # [R, S, S]
        target = (self._space.target(depth) - self._space.mean) / self._space.deviation
        return torch.where(depth > 0, outputs - target, 0.0)


def reverse_huber(errors: Tensor, largest: Tensor | None = None) -> Tensor:
    """Return |e| if |e| <= c, else (e^2 + c^2) / 2 c. The threshold c = 0.2 x largest |e| has no gradient.

    Args:
        errors: [R, ...]; 0 where unknown.
        largest: largest |e|, []; `None` = that of each image.
    """
    size = errors.abs()
    if largest is None:
        largest = size.detach().flatten(1).amax(1).view(-1, *[1] * (errors.ndim - 1))  # [R, 1, 1]
    threshold = (0.2 * largest).clamp(min=torch.finfo(errors.dtype).tiny)
    return torch.where(size <= threshold, size, (errors.square() + threshold.square()) / (2 * threshold))


class LargestError(Hook):
    """Adds the largest error of the global batch to its micro-batches, from an additional forward pass without
    gradients. A batch of a single micro-batch needs no such pass."""

    name = "largest_error"

    def __init__(self, objective: DepthObjective) -> None:
        self.objective = objective
        self._added: dict[Extra, Tensor] = {}

    @torch.no_grad()
    def before_step(self, ctx: StepContext) -> None:
        self._added = {}
        if len(ctx.window) > 1 or ctx.data_group.size > 1:
            errors = [self.objective.errors(ctx.engine, ctx.prepare_batch(micro)).abs().max() for micro in ctx.window]
            self._added = {LARGEST: ctx.data_group.max(torch.stack(errors).max())}

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding(self._added)

    def after_step(self, ctx: StepContext) -> None:
        self._added = {}


NAMES = ("delta_1", "delta_2", "delta_3", "rmse", "rel", "log10")


class DepthErrors:
    """Sums errors of each image; see `Metrics`. Sums are added in stored order, so metrics do not depend on the number
    of ranks."""

    def __init__(
        self,
        space: DepthSpace,
        alignment: Literal["none", "scale_shift"] = "none",
        region: Literal["whole", "eigen"] = "whole",
    ) -> None:
        self._space, self._alignment, self._region = space, alignment, region
        self._rows = GatheredRows()

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Add the predicted targets [H, W] of each row."""
        sums, constants = [], []
        for row, (predicted, (height, width)) in enumerate(zip(outputs, batch["sizes"].tolist(), strict=True)):
            true = batch["whole_depth"][row, :height, :width].double()
            measured = (true > 0) & region_mask(height, width, self._region, true.device)
            sums.append(self._sums(predicted.double()[measured], true[measured]))
            constants.append(self._sums(torch.full_like(true[measured], self._space.mean), true[measured]))
        self._rows.add(batch, sums=torch.stack(sums), constant=torch.stack(constants))

    def _sums(self, predicted: Tensor, true: Tensor) -> Tensor:
        target = self._space.target(true)
        if self._alignment == "scale_shift":
            predicted = align_prediction(predicted, target)
        return error_sums(self._space.depth(predicted), true)

    def finish(self, group: Group) -> dict[str, Any]:
        """Return metrics over all measured pixels; "detail" has means over images of each image's metrics.

        constant_delta_1 is delta_1 of predicting the training mean everywhere.

        Raises:
            RefusedError: no pixel was measured.
        """
        rows = self._rows.gather(group)
        sums = rows["sums"]  # [n, 7]
        if not sums[:, 0].sum():
            raise RefusedError(
                "the evaluated depth maps have no measured pixel; check --dense.min_depth, --dense.max_depth and "
                "--dense.region"
            )
        images = sums[sums[:, 0] > 0]
        return {
            **depth_metrics(sums.sum(0)),
            f"{CONSTANT}delta_1": depth_metrics(rows["constant"].sum(0))["delta_1"],
            "detail": {
                "mean_over_images": {
                    name: float(np.mean([depth_metrics(row)[name] for row in images])) for name in NAMES
                },
                "pixels": int(sums[:, 0].sum()),
                "images": len(images),
            },
        }


def error_sums(predicted: Tensor, true: Tensor) -> Tensor:
    """Return for depth [n] the number of pixels, then sums over pixels for each metric of NAMES, [7] float64."""
    ratio = torch.maximum(predicted / true, true / predicted)
    logarithms = (predicted.log10() - true.log10()).abs()
    parts = [torch.ones_like(true), *((ratio < 1.25**power).to(true.dtype) for power in (1, 2, 3))]
    parts += [(predicted - true).square(), (predicted - true).abs() / true, logarithms]
    return torch.stack(parts).sum(1, dtype=torch.float64)


def depth_metrics(sums: Any) -> dict[str, float]:
    """Return metrics from `error_sums`: delta_k is the share of pixels with max(p / t, t / p) < 1.25^k; rmse is in the
    unit of depth; rel is the mean of |p - t| / t; log10 is the mean of |log10 p - log10 t|."""
    means = dict(zip(NAMES, (sums[1:] / sums[0]).tolist(), strict=True))
    return {**means, "rmse": means["rmse"] ** 0.5}


def align_prediction(predicted: Tensor, target: Tensor) -> Tensor:
    """Return s predicted + b with the least-squares scale s and shift b (Ranftl et al. 2022); s = 0 for a constant
    prediction. All are [n] float64."""
    if not len(target):
        return predicted
    centred, wanted = predicted - predicted.mean(), target - target.mean()
    variance = centred @ centred
    scale = torch.where(variance > 0, centred @ wanted / variance.clamp(min=torch.finfo(variance.dtype).tiny), 0.0)
    return scale * centred + target.mean()


def region_mask(
    height: int, width: int, region: Literal["whole", "eigen"], device: torch.device | None = None
) -> Tensor:
    """Return the mask [H, W] of evaluated pixels."""
    mask = torch.ones(height, width, dtype=torch.bool, device=device)
    if region == "eigen":  # Eigen's crop of NYUv2, as shares of height and width
        top, bottom, left, right = 45 / 480, 471 / 480, 41 / 640, 601 / 640
        mask[: round(top * height)] = mask[round(bottom * height) :] = False
        mask[:, : round(left * width)] = mask[:, round(right * width) :] = False
    return mask
