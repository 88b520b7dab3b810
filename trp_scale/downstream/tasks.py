"""The downstream tasks: one module each; `build_task` is the only place that knows their names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.task import DownstreamTask

MODULES = {
    "glue": ("glue.task", "GlueTask"),
    "classification": ("classification.task", "ClassificationTask"),
    "segmentation": ("dense.segmentation", "SegmentationTask"),
    "depth": ("dense.depth", "DepthTask"),
    "detection": ("detection.task", "DetectionTask"),
}
"""Module and class, by `downstream.kind`; imported when asked for, since each has libraries of its own."""


def build_task(config: FinetuneConfig, environment: Environment) -> DownstreamTask:
    """Open the data of `downstream.kind`, and complete the settings that follow from them, in place.

    Raises:
        DataError: the data is missing, damaged or of another format.
        RefusedError: settings that do not fit the data or each other.
    """
    module, name = MODULES[config.downstream.kind]
    task: Any = getattr(import_module(f"trp_scale.downstream.{module}"), name)
    return task(config, environment)  # type: ignore[no-any-return]
