"""Pre-training of encoders with minimax task weights, adversarial positions and learned masks.

    import trp_scale as trp

Names in `__all__` are stable; docs/extending.md shows their use. A name is imported when it is first used, so that
`import trp_scale` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trp_scale.api import Run as Run
    from trp_scale.api import compare as compare
    from trp_scale.api import evaluate as evaluate
    from trp_scale.api import export as export
    from trp_scale.api import finetune as finetune
    from trp_scale.api import known_recipes as known_recipes
    from trp_scale.api import load as load
    from trp_scale.api import plan as plan
    from trp_scale.api import pretrain as pretrain
    from trp_scale.api import probe as probe
    from trp_scale.api import report as report
    from trp_scale.api import shard_images as shard_images
    from trp_scale.api import shard_text as shard_text
    from trp_scale.config import PretrainConfig as PretrainConfig
    from trp_scale.config.recipes import recipe as recipe
    from trp_scale.config.registry import MetricPlot as MetricPlot
    from trp_scale.config.registry import Section as Section
    from trp_scale.config.registry import Settings as Settings
    from trp_scale.config.registry import component as component
    from trp_scale.config.registry import describe_metrics as describe_metrics
    from trp_scale.config.registry import setting as setting
    from trp_scale.core.batch import Batch as Batch
    from trp_scale.core.batch import StepStats as StepStats
    from trp_scale.core.batch import TaskLosses as TaskLosses
    from trp_scale.core.hooks import Balancer as Balancer
    from trp_scale.core.hooks import Hook as Hook
    from trp_scale.core.hooks import StepContext as StepContext
    from trp_scale.core.pieces import Shards as Shards
    from trp_scale.core.run import RunContext as RunContext
    from trp_scale.data.images.maps import MapFormat as MapFormat
    from trp_scale.errors import RefusedError as RefusedError
    from trp_scale.evaluation.reports import Exported as Exported
    from trp_scale.evaluation.reports import Report as Report
    from trp_scale.methods.balancing.base import TaskBalancer as TaskBalancer
    from trp_scale.planning.command import RunPlan as RunPlan
    from trp_scale.pretraining.modalities.base import Modality as Modality
    from trp_scale.reporting.comparison import Comparison as Comparison
    from trp_scale.reporting.comparison import Measurement as Measurement


__version__ = "0.2.0"

_NAMES = {
    "trp_scale.api": "Run compare evaluate export finetune known_recipes load plan pretrain probe report "
    "shard_images shard_text",
    "trp_scale.config": "PretrainConfig",
    "trp_scale.config.recipes": "recipe",
    "trp_scale.config.registry": "MetricPlot Section Settings component describe_metrics setting",
    "trp_scale.core.batch": "Batch StepStats TaskLosses",
    "trp_scale.core.hooks": "Balancer Hook StepContext",
    "trp_scale.core.pieces": "Shards",
    "trp_scale.core.run": "RunContext",
    "trp_scale.data.images.maps": "MapFormat",
    "trp_scale.errors": "RefusedError",
    "trp_scale.evaluation.reports": "Exported Report",
    "trp_scale.methods.balancing.base": "TaskBalancer",
    "trp_scale.planning.command": "RunPlan",
    "trp_scale.pretraining.modalities.base": "Modality",
    "trp_scale.reporting.comparison": "Comparison Measurement",
}
"""Names of each module."""

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_HOME])

if not TYPE_CHECKING:  # type checkers still report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
