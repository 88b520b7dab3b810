"""What tasks of pixels have in common: images with one map, jittered to learn from, whole to measure on."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import nn

from trp_scale.data.mixture import parse_paths
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.dense.model import PixelModel
from trp_scale.downstream.dense.rows import DenseData, DenseMaps, open_dense
from trp_scale.downstream.dense.settings import DenseTaskConfig
from trp_scale.downstream.task import ImageTask, open_task_sources
from trp_scale.observe.throughput import TRAINING_OVER_FORWARD, forward_flops

DenseRun = TypeVar("DenseRun", bound=DenseTaskConfig)


class DenseTask(ImageTask[DenseRun]):
    """Data and model of a task of pixels; what is learned and measured is the subclass's."""

    maps: type[DenseMaps]

    def __init__(self, config: DenseRun, environment: Environment) -> None:
        self.config = config
        paths = parse_paths(config.data.path)
        test_path = config.downstream.test_path
        test_paths = parse_paths(test_path) if test_path else None
        data = open_dense(config, paths, self.maps)
        test = data if test_paths is None else open_dense(config, test_paths, self.maps)
        self._outputs = self.complete(data, test)
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

    def model(self) -> nn.Module:
        model = PixelModel(self.config, self._outputs)
        self.take_encoder(model)
        side = self.config.crops.size
        image = forward_flops(model, torch.empty(1, 3, side, side, device="meta"))
        self.step_flops = TRAINING_OVER_FORWARD * self.config.batch.global_size * image
        return model
