"""Pre-training of encoders with minimax task weights, adversarial positions and learned masks.

    import trp_scale as trp

Names in `__all__` are stable; docs/extending.md shows their use. A name is imported when it is first used, so that
`import trp_scale` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trp_scale.api import Run, known_recipes, load, pretrain, shard_images, shard_text
    from trp_scale.config import PretrainConfig
    from trp_scale.config.recipes import recipe
    from trp_scale.config.registry import MetricPlot, component, describe_metrics
    from trp_scale.config.settings import Section, Settings, setting
    from trp_scale.core.batch import Batch, StepStats, TaskLosses
    from trp_scale.core.hooks import Balancer, Hook, StepContext
    from trp_scale.core.pieces import Shards
    from trp_scale.core.run import RunContext
    from trp_scale.data.images.maps import MapFormat
    from trp_scale.errors import RefusedError
    from trp_scale.methods.balancing.base import TaskBalancer
    from trp_scale.pretraining.modalities.base import Modality

__version__ = "0.2.0"

__all__ = [
    "Balancer",
    "Batch",
    "Hook",
    "MapFormat",
    "MetricPlot",
    "Modality",
    "PretrainConfig",
    "RefusedError",
    "Run",
    "RunContext",
    "Section",
    "Settings",
    "Shards",
    "StepContext",
    "StepStats",
    "TaskBalancer",
    "TaskLosses",
    "__version__",
    "component",
    "describe_metrics",
    "known_recipes",
    "load",
    "pretrain",
    "recipe",
    "setting",
    "shard_images",
    "shard_text",
]

_NAMES = {
    "api": "Run known_recipes load pretrain shard_images shard_text",
    "config": "PretrainConfig",
    "config.recipes": "recipe",
    "config.registry": "MetricPlot component describe_metrics",
    "config.settings": "Section Settings setting",
    "core.batch": "Batch StepStats TaskLosses",
    "core.hooks": "Balancer Hook StepContext",
    "core.pieces": "Shards",
    "core.run": "RunContext",
    "data.images.maps": "MapFormat",
    "errors": "RefusedError",
    "methods.balancing.base": "TaskBalancer",
    "pretraining.modalities.base": "Modality",
}
_HOME = {name: f"trp_scale.{module}" for module, names in _NAMES.items() for name in names.split()}
"""Module of each name."""

if not TYPE_CHECKING:  # type checkers still report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
