"""What tasks of pixels have in common: images with one map, jittered to learn from, whole to measure on."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.data.images.dense_rows import DenseData, MapName, open_dense
from trp_scale.data.mixture import parse_paths
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.encoder_source import SCRATCH, open_encoder
from trp_scale.evaluation.tasks.base import TaskParts, open_task_sources, take_encoder
from trp_scale.models.pixel_model import PixelModel


class DenseTask(TaskParts):
    """Data and model of a task of pixels; what is learned and measured is the subclass's."""

    map_name: MapName

    def __init__(self, config: FinetuneConfig, environment: Environment) -> None:
        check_dense(config)
        self.config = config
        paths = parse_paths(config.data.path)
        test_path = config.downstream.test_path
        test_paths = parse_paths(test_path) if test_path else None
        data = open_dense(config, paths, self.map_name)
        test = data if test_paths is None else open_dense(config, test_paths, self.map_name)
        if data.meta.semseg_classes != test.meta.semseg_classes:
            raise RefusedError(
                f"--downstream.test_path {test_path} has other classes than --data.path {config.data.path}; shard both "
                "with the same --semseg_classes"
            )
        self._outputs = self.complete(data)
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
        self.name = config.downstream.task or config.downstream.kind
        self.positions_per_step = config.batch.global_size * (config.crops.size // config.vision.patch_size) ** 2
        self.step_flops = 0.0

    @abstractmethod
    def complete(self, data: DenseData) -> int:
        """Write the settings that follow from the data into the configuration; returns the model's outputs."""

    def model(self) -> nn.Module:
        model = PixelModel(self.config, self._outputs)
        if (path := self.config.model.weights) and path != SCRATCH:
            take_encoder(model.encoder, open_encoder(path).image_weights(model.encoder.grid), path)
        return model


def check_dense(config: FinetuneConfig) -> None:
    """Refuse settings that no task of pixels can have.

    Raises:
        RefusedError: naming the flag, the value found and the values allowed.
    """
    dense = config.dense
    if not 0 < dense.min_scale <= dense.max_scale <= MOST_SCALE:
        raise RefusedError(
            f"--dense.min_scale {dense.min_scale} and --dense.max_scale {dense.max_scale}: allowed: more than 0, the "
            f"second no less than the first, at most {MOST_SCALE}"
        )
    for name, low, high in (("overlap", 0.0, 0.9), ("auxiliary_weight", 0.0, 10.0)):
        if not low <= getattr(dense, name) <= high:
            raise RefusedError(f"--dense.{name} is {getattr(dense, name)}, allowed: {low:g} to {high:g}")
    if dense.width < 0 or (dense.width and dense.width % WIDTH_UNIT):
        raise RefusedError(f"--dense.width is {dense.width}, allowed: 0 (the head's own) or multiples of {WIDTH_UNIT}")
    if dense.min_depth <= 0 or not (dense.max_depth == 0 or dense.max_depth > dense.min_depth):
        raise RefusedError(
            f"--dense.min_depth {dense.min_depth} and --dense.max_depth {dense.max_depth}: allowed: more than 0, the "
            "second more than the first, or 0 for no limit"
        )
    if dense.depth_deviation < 0:
        raise RefusedError(f"--dense.depth_deviation is {dense.depth_deviation}, allowed: 0 (the data's) or more")


MOST_SCALE = 10.0
"""Largest scale of a jitter: a hundredth of the image fills the crop."""

WIDTH_UNIT = 8
"""Heads have 3/8 and half as many channels in places."""
