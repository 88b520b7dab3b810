"""Pre-training of encoders with minimax task weights, adversarial positions and learned masks.

    import trp_scale as trp

Names in `__all__` are stable; docs/extending.md shows their use. A name is imported when it is first used, so that
`import trp_scale` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trp_scale.api import (
        Run,
        compare,
        evaluate,
        export,
        finetune,
        known_recipes,
        load,
        plan,
        pretrain,
        probe,
        report,
        shard_images,
        shard_text,
    )
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
    from trp_scale.evaluation.reports import Exported, Report
    from trp_scale.methods.balancing.base import TaskBalancer
    from trp_scale.planning.command import Plan
    from trp_scale.pretraining.modalities.base import Modality
    from trp_scale.reporting.comparison import Comparison
    from trp_scale.reporting.measurement import Measurement

__version__ = "0.2.0"

__all__ = [
    "Balancer",
    "Batch",
    "Comparison",
    "Exported",
    "Hook",
    "MapFormat",
    "Measurement",
    "MetricPlot",
    "Modality",
    "Plan",
    "PretrainConfig",
    "RefusedError",
    "Report",
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
    "compare",
    "component",
    "describe_metrics",
    "evaluate",
    "export",
    "finetune",
    "known_recipes",
    "load",
    "plan",
    "pretrain",
    "probe",
    "recipe",
    "report",
    "setting",
    "shard_images",
    "shard_text",
]

_NAMES = {
    "trp_scale.config": "PretrainConfig",
    "trp_scale.config.recipes": "recipe",
    "trp_scale.config.registry": "MetricPlot component describe_metrics",
    "trp_scale.config.settings": "Section Settings setting",
    "trp_scale.core.batch": "Batch StepStats TaskLosses",
    "trp_scale.core.hooks": "Balancer Hook StepContext",
    "trp_scale.core.pieces": "Shards",
    "trp_scale.core.run": "RunContext",
    "trp_scale.data.images.maps": "MapFormat",
    "trp_scale.errors": "RefusedError",
    "trp_scale.evaluation.reports": "Exported Report",
    "trp_scale.methods.balancing.base": "TaskBalancer",
    "trp_scale.planning.command": "Plan",
    "trp_scale.pretraining.modalities.base": "Modality",
    "trp_scale.reporting.comparison": "Comparison",
    "trp_scale.reporting.measurement": "Measurement",
}
"""Names of each module; all others are of trp_scale.api."""

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers still report unknown names

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME.get(name, "trp_scale.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
