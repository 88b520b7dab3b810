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

_HOME = {
    "Balancer": "trp_scale.core.hooks",
    "Batch": "trp_scale.core.batch",
    "Hook": "trp_scale.core.hooks",
    "MapFormat": "trp_scale.data.images.maps",
    "MetricPlot": "trp_scale.config.registry",
    "Modality": "trp_scale.pretraining.modalities.base",
    "PretrainConfig": "trp_scale.config",
    "RefusedError": "trp_scale.errors",
    "Run": "trp_scale.api",
    "RunContext": "trp_scale.core.run",
    "Section": "trp_scale.config.settings",
    "Settings": "trp_scale.config.settings",
    "Shards": "trp_scale.core.pieces",
    "StepContext": "trp_scale.core.hooks",
    "StepStats": "trp_scale.core.batch",
    "TaskBalancer": "trp_scale.methods.balancing.base",
    "TaskLosses": "trp_scale.core.batch",
    "component": "trp_scale.config.registry",
    "describe_metrics": "trp_scale.config.registry",
    "known_recipes": "trp_scale.api",
    "load": "trp_scale.api",
    "pretrain": "trp_scale.api",
    "recipe": "trp_scale.config.recipes",
    "setting": "trp_scale.config.settings",
    "shard_images": "trp_scale.api",
    "shard_text": "trp_scale.api",
}
"""Module of each name."""

if not TYPE_CHECKING:  # type checkers still report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
