"""Every setting of a run: nested, typed, keyword-only dataclasses.

The string under a field is its help text on the command line (`--section.field value`). A field whose name is a Python
keyword ends in an underscore here and nowhere else (`crops.from`). This package imports nothing of ours; reading and
checking live in `trp_scale/recipes/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import tyro.conf

from trp_scale.config.components import Component, default_settings, find, names, unknown_component
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
    MOST_PATCHES,
    CropsConfig,
    DataConfig,
    DecodedVisionConfig,
    MaskingConfig,
    ModelConfig,
    PatchSplit,
    RelativeVisionConfig,
    TextModelConfig,
    VisionConfig,
    split_patches,
)
from trp_scale.errors import RefusedError, nearest

__all__ = [
    "MOST_PATCHES",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CropsConfig",
    "DataConfig",
    "DecodedVisionConfig",
    "LoggingConfig",
    "MaskingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PatchSplit",
    "PretrainConfig",
    "RefusedError",
    "RelativeVisionConfig",
    "TextModelConfig",
    "TrainingConfig",
    "ValidationConfig",
    "VisionConfig",
    "nearest",
    "split_patches",
]


@dataclass(kw_only=True)
class Config:
    """One run. A hook that is listed has a section of its name beside these (`run_type`)."""

    lists: ClassVar[tuple[str, ...]] = ("hooks",)
    """Settings that name components; each of these has a section of its own."""

    modules: Annotated[list[str], tyro.conf.Suppress] = field(default_factory=list)
    """Set by --module: modules of your own whose components this run may use."""
    hooks: list[str] = field(default_factory=list)
    """Methods that act on each step beside the balancer, in the order in which they are called."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balancer: Any = field(default_factory=default_settings("balancer", "minimax"), metadata={"role": "balancer"})
    """Settings of the balancer of this kind."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def reads(self) -> str:
        """Kind of the rows that the encoder reads, as dataset.json has it: text or image."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        """What no run of these settings can have, beside ranges and what each section says of itself: each line names
        the flag, the value found and what is allowed."""
        return iter(())

    def cautions(self) -> Iterator[str]:
        """What is allowed but rarely meant, beside what each section says of itself."""
        return iter(())

    @classmethod
    def parts(cls, document: Mapping[str, Any], problems: list[str]) -> list[Component]:
        """The components that the settings `document` list, as far as there are such; the others are problems."""
        listed = document.get("hooks")
        given, known = [str(name) for name in listed] if isinstance(listed, list) else [], names("hook")
        problems += [f"hooks: {unknown_component('hook', name)}" for name in given if name not in known]
        return [find("hook", name) for name in given if name in known]

    def absent(self, section: str) -> str:
        """Why this run lacks the section of a component, and which flag adds it; empty where no list would."""
        if section not in names("hook"):
            return ""
        return f"this run has no hook {section}; --hooks {' '.join([*self.hooks, section])} adds it"


@dataclass(kw_only=True)
class PretrainConfig(Config):
    """One pre-training run; what the upstream task `upstream` has of its own is in a class derived from this."""

    upstream: str = setting("", was=("model.kind", "objective.kind"))
    """What the encoder learns from; a recipe's, or a name that a module of yours registers."""
