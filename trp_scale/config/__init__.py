"""Every setting of a run: nested, typed, keyword-only dataclasses.

The string under a field is its help text on the command line (`--section.field value`). A field whose name is a Python
keyword ends in an underscore here and nowhere else (`crops.from`). This package imports nothing of ours; reading and
checking live in `trp_scale/recipes/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro.conf

from trp_scale.config.components import default_settings
from trp_scale.config.modalities import ModalitiesConfig
from trp_scale.config.patches import MOST_PATCHES, PatchSplit, split_patches
from trp_scale.config.run import (
    BatchConfig,
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from trp_scale.config.settings import setting
from trp_scale.config.upstream import (
    CropsConfig,
    DataConfig,
    MaskingConfig,
    ModelConfig,
    ObjectiveConfig,
    VisionConfig,
)
from trp_scale.errors import RefusedError, nearest

__all__ = [
    "MOST_PATCHES",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CropsConfig",
    "DataConfig",
    "LoggingConfig",
    "MaskingConfig",
    "ModalitiesConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PatchSplit",
    "PretrainConfig",
    "RefusedError",
    "TrainingConfig",
    "ValidationConfig",
    "VisionConfig",
    "nearest",
    "split_patches",
]


@dataclass(kw_only=True)
class Config:
    """One run. A hook that is listed has a section of its name beside these (`run_type`)."""

    modules: Annotated[list[str], tyro.conf.Suppress] = field(default_factory=list)
    """Set by --module: modules of your own whose components this run may use."""
    hooks: list[str] = field(default_factory=list)
    """Methods that act on each step beside the balancer, in the order in which they are called."""
    model: ModelConfig = field(default_factory=ModelConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    modalities: ModalitiesConfig = field(default_factory=ModalitiesConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    crops: CropsConfig = field(default_factory=CropsConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balancer: Any = field(default_factory=default_settings("balancer", "minimax"), metadata={"role": "balancer"})
    """Settings of the balancer of this kind."""
    adversary: Any = field(default_factory=default_settings("adversary", "none"), metadata={"role": "adversary"})
    """Settings of the adversary of this kind."""
    multilevel: Any = field(default_factory=default_settings("multilevel", "none"), metadata={"role": "multilevel"})
    """Settings of learned masks of this kind."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def problems(self) -> Iterator[str]:
        """What no run of these settings can have, beside ranges and what each section says of itself: each line names
        the flag, the value found and what is allowed."""
        return iter(())

    @property
    def reads(self) -> str:
        """Kind of the rows that the encoder reads, as dataset.json has it: text or image."""
        raise NotImplementedError


@dataclass(kw_only=True)
class PretrainConfig(Config):
    """One pre-training run; what the upstream task `upstream` has of its own is in a class derived from this."""

    upstream: str = setting("", was=("model.kind", "objective.kind"))
    """What the encoder learns from; a recipe's, or a name that a module of yours registers."""
