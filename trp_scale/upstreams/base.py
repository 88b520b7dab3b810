"""What a run learns from: data, model and objective that belong together, one class for each kind of objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trp_scale.config import Config, PretrainConfig
from trp_scale.config.components import find
from trp_scale.core.hooks import Hook
from trp_scale.core.objective import Objective
from trp_scale.core.run import RunContext
from trp_scale.data.sources import Sources
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.training.loop import WindowSource


class Upstream(Protocol):
    """The upstream task as the run needs it.

    Attributes:
        sources: named streams of rows.
        positions_per_step: sequence positions of a step on all ranks, padding included.
        step_flops: model FLOPs of a training step on all ranks.
    """

    sources: Sources
    positions_per_step: int
    step_flops: float

    @property
    def source(self) -> WindowSource:
        """Where a step's global batch comes from: `sources.train`, unless a step learns from two sources."""
        ...

    @property
    def objective(self) -> Objective:
        """Task losses of a batch."""
        ...

    def model(self) -> nn.Module:
        """The model with its initial weights, from the seed or from `model.weights`, whole, on the CPU."""
        ...

    def hooks(self, run: RunContext) -> list[Hook]:
        """Methods that act on this model, beside the balancer; none when they are off."""
        ...

    def leave(self, run_dir: Path, world: Group) -> None:
        """Copy into the run directory what an export needs beside the checkpoint."""
        ...

    def checkpoint_extra(self) -> dict[str, Any]:
        """JSON values that an export needs to know of the data."""
        ...


def build_upstream(config: Config, environment: Environment) -> Upstream:
    """Open the data and choose model and objective; torchvision and timm are imported for images only."""
    assert isinstance(config, PretrainConfig)
    upstream: Upstream = find("upstream", config.upstream).load()(config, environment)
    return upstream
