"""Depth estimation: fine-tuning on the distance of each pixel (TRP 4.2.3 and Table 7: NYUv2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext
from trp_scale.data.mixture import parse_paths
from trp_scale.data.plan import TrainPlan
from trp_scale.data.split import held_out
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.dense.depth_metrics import DepthErrors
from trp_scale.downstream.dense.depth_objective import Depth, DepthSpace, LargestError
from trp_scale.downstream.dense.maps import DepthMaps
from trp_scale.downstream.dense.rows import DenseData, depth_statistics
from trp_scale.downstream.dense.settings import DepthTaskConfig
from trp_scale.downstream.dense.task import DenseTask
from trp_scale.downstream.whole_images import predict_whole

SAMPLED_MAPS = 256
"""Training maps from which mean and deviation are taken."""

NEARER = {True: "nearer", False: "farther"}


class DepthTask(DenseTask[DepthTaskConfig]):
    """Depth of pixels; see `DownstreamTask`."""

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
        self.objective = Depth(self.space, dense.threshold)

    def hooks(self, run: RunContext) -> list[Hook]:
        return [LargestError(self.objective)] if self.config.dense.threshold == "batch" else []

    def complete(self, data: DenseData, measured: DenseData) -> int:
        maps, dense = data.maps, self.config.dense
        assert isinstance(maps, DepthMaps) and isinstance(measured.maps, DepthMaps)
        path, test_path = self.config.data.path, self.config.downstream.test_path or self.config.data.path
        if maps.nearer and dense.target == "metric":
            raise RefusedError(
                f"{path}: larger numbers of its depth maps are nearer (inverse depth), --dense.target is metric; "
                "allowed: --dense.target inverse"
            )
        if maps.nearer is not measured.maps.nearer:
            raise RefusedError(
                f"{test_path}: larger numbers of its depth maps are {NEARER[measured.maps.nearer]}, of {path} "
                f"{NEARER[maps.nearer]}; allowed: maps of one direction"
            )
        for one, where in ((maps, path), (measured.maps, test_path)):
            if not one.metric and dense.alignment == "none":
                raise RefusedError(
                    f"{where}: its depth maps have no metres (scale null in dataset.json), so that errors of a "
                    "prediction mean nothing as they are; allowed: --dense.alignment scale_shift, or shard again with "
                    "--depth_scale"
                )
        self._inverted = dense.target == "inverse" and not maps.nearer
        if dense.depth_deviation == 0:
            dense.depth_mean, dense.depth_deviation = self._statistics(data)
        return 1

    def _statistics(self, data: DenseData) -> tuple[float, float]:
        """Mean and deviation of the first maps in the training order, which is the same on all ranks."""
        config = self.config
        paths, rows = parse_paths(config.data.path), data.rows(config, whole=False)
        fraction = 0.0 if config.downstream.test_path else config.data.validation_fraction
        chosen = [
            ~held_out(blocks.identities, fraction, where=str(path.path))
            for blocks, path in zip(rows.blocks, paths, strict=True)
        ]
        plan = TrainPlan(
            seed=config.training.seed,
            members=rows.members(paths, chosen),
            blocks_per_group=config.data.blocks_per_group,
        )
        addresses = plan.locate(np.arange(min(SAMPLED_MAPS, plan.rows)))
        return depth_statistics(data, addresses, inverse=self._inverted)

    def predict(self, forward: Callable[..., list[Tensor]], batch: Batch) -> list[Tensor]:
        """The target (depth or its inverse) of each pixel of each whole image, [H, W] float32; `space.depth` turns it
        into depth."""
        space = self.space
        return [
            space.mean + space.deviation * output[0] for output in predict_whole(forward, self.objective.pixels, batch)
        ]

    def metrics(self) -> DepthErrors:
        dense = self.config.dense
        return DepthErrors(self.space, dense.alignment, dense.region)
