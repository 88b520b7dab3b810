"""Context of a run for balancers and other hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config
from trp_scale.core.engine import Engine
from trp_scale.core.objective import Objective
from trp_scale.core.seeds import reseed, tensor_seed
from trp_scale.distributed.groups import ALONE, Group

MakeEngine = Callable[[nn.Module, Config], Engine]
"""Wraps a second module, which a hook trains, in an engine of the run's kind with its own settings."""

MakeModel = Callable[[], nn.Module]
"""Builds another model like the run's, with its initial weights."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Constants of a run.

    Attributes:
        config: all settings.
        objective: the tasks.
        engine: engine of the model.
        world: all ranks.
        sources: named streams of rows (data/sources.py).
        make_engine, make_model: for modules that a hook trains in addition.
        steps_per_epoch: global batches of an epoch, rounded up; 0 = unknown.
    """

    config: Config
    objective: Objective
    engine: Engine
    world: Group = ALONE
    sources: Any = None
    make_engine: MakeEngine | None = None
    make_model: MakeModel | None = None
    steps_per_epoch: int = 0

    @property
    def device(self) -> torch.device:
        """Device of the model and of [T] vectors."""
        return self.engine.device

    @property
    def data_group(self) -> Group:
        """Ranks that split the global batch."""
        return self.engine.data_group

    @property
    def seed(self) -> int:
        """Only source of randomness: derive from (seed, step or row key), never from a generator's state."""
        return self.config.training.seed

    def reseed(self, name: str) -> None:
        """Seed the device's generator from (seed, name)."""
        reseed(self.device, tensor_seed(self.seed, name))
