"""Every setting of a run: nested, typed, keyword-only dataclasses.

The string under a field is its help text on the command line (`--section.field value`). A field whose name is a Python
keyword ends in an underscore here and nowhere else (`crops.from`). This package imports nothing of ours; reading and
checking live in `trp_scale/recipes/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trp_scale.config.hooks import AdversaryConfig, BalancerConfig
from trp_scale.config.modalities import ModalitiesConfig
from trp_scale.config.multilevel import MultilevelConfig
from trp_scale.config.patches import MOST_PATCHES, PatchSplit, split_patches
from trp_scale.config.run import (
    BatchConfig,
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
    ValidationConfig,
)
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
    "AdversaryConfig",
    "BalancerConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CropsConfig",
    "DataConfig",
    "LoggingConfig",
    "MaskingConfig",
    "ModalitiesConfig",
    "ModelConfig",
    "MultilevelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PatchSplit",
    "RefusedError",
    "TrainingConfig",
    "ValidationConfig",
    "VisionConfig",
    "nearest",
    "split_patches",
]


@dataclass(kw_only=True)
class Config:
    """One run."""

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
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    adversary: AdversaryConfig = field(default_factory=AdversaryConfig)
    multilevel: MultilevelConfig = field(default_factory=MultilevelConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
