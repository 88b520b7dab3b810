"""Upstreams: data, model and objective that belong together, one class for each kind of objective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from trp_scale.config import Config, PretrainConfig, RefusedError
from trp_scale.config.registry import find
from trp_scale.core.batch import Batch, WindowSource
from trp_scale.core.hooks import Hook
from trp_scale.core.objective import Objective
from trp_scale.core.run import RunContext
from trp_scale.data import sources as data_sources
from trp_scale.data.sources import OpenLabelled, Rows, Sources
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of a data set on which shapes depend beside the settings.

    Attributes:
        length: pieces of a sequence; 0: as many as the model has positions for.
        vocabulary: pieces.
        classes: of each modality's maps, where they have any.
    """

    length: int = 0
    vocabulary: int = 30522
    classes: Mapping[str, int] = field(default_factory=lambda: {"semseg": 133})


COUNTED_ROWS = 16
"""Rows of which FLOPs are counted: products that do not depend on the rows, such as AdPE's tables, vanish."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A run as far as it is known without its data: enough to count its memory and arithmetic.

    Attributes:
        model: makes the model.
        objective: task losses of a batch.
        rows: a batch of so many rows, with the shapes and types of the data's and no content worth reading.
        step_rows: rows of a step on all ranks.
        positions: of a row.
    """

    model: Callable[[], nn.Module]
    objective: Objective
    rows: Callable[[int], Batch]
    step_rows: int
    positions: int

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of a forward pass over the rows of a step, without what hooks add."""
        batch = self.rows(COUNTED_ROWS).to(torch.device("meta"))
        return count_flops(self.model, lambda model: self.objective(model, batch)) / batch.rows * self.step_rows

    def step_flops(self, ranks: int) -> float:
        """Return the model FLOPs of a training step on all of `ranks` ranks."""
        return TRAINING_OVER_FORWARD * self.forward_flops


class Upstream(Protocol):
    """Upstream task as the run needs it, with the defaults of what an upstream need not say.

    Attributes:
        exports: {library: "module:function" that writes a checkpoint for it} (checkpoint/export.py: `Writer`).
        sources: named streams of rows.
        source: of a step's global batch: `sources.train`, unless a step learns from two sources.
        objective: task losses of a batch.
        positions_per_step: sequence positions of a step on all ranks, padding included.
        open_rows: function of (config, [MemberPath, ...]) that opens data sets of the kind that it learns from. Raises
            DataError if the data is missing, damaged or of another format, or the members of a mixture differ;
            RefusedError for settings that do not fit the data or each other, or data of another kind.
    """

    exports: ClassVar[Mapping[str, str]]
    open_rows: ClassVar[Callable[..., Rows]]
    sources: Sources
    source: WindowSource
    objective: Objective
    positions_per_step: int

    def __init__(self, config: Any, environment: Environment) -> None: ...

    @classmethod
    def open_sources(cls, config: Any, *, rank: int, world: int, device_type: str = "cpu") -> Sources:
        """Open a run's data on one rank (data/sources.py)."""
        return data_sources.open_sources(
            config,
            partial(cls.open_rows, config),
            workers_import=cls.open_rows.__module__,
            labelled=cls.open_labelled(config, rank=rank, world=world, pin=device_type == "cuda"),
            rank=rank,
            world=world,
            device_type=device_type,
        )

    @classmethod
    def open_rank_sources(cls, config: Any, environment: Environment) -> Sources:
        """Open this rank's part of the data, with at most as many workers as it has CPUs."""
        rank, world = environment.data.rank, environment.data.size
        config = data_sources.within_cpus(config, environment.cpus)
        return cls.open_sources(config, rank=rank, world=world, device_type=environment.device.type)

    @staticmethod
    def open_labelled(config: Any, *, rank: int, world: int, pin: bool) -> OpenLabelled | None:
        """Return the function that takes labelled rows out of the data (data/sources.py); `None` without such
        sources."""
        return None

    @classmethod
    def facts(cls, config: Any) -> DataFacts:
        """Read the facts of the data set at `data.path`.

        Raises: as `open_rows`.
        """
        return DataFacts()

    @classmethod
    def outline(cls, config: Any, facts: DataFacts) -> Outline:
        """Describe the run without its data, for `trp-scale plan`.

        Raises:
            RefusedError: this upstream cannot say it.
        """
        raise RefusedError(
            f"--upstream {config.upstream} cannot be planned: {cls.__name__} has no method `outline`, which says what "
            "its runs are made of without their data; allowed: an upstream of the package, or one that defines it"
        )

    @property
    @abstractmethod
    def step_flops(self) -> float:
        """Model FLOPs of a training step on all ranks."""
        ...

    def worst_case_batch(self, batch: Batch) -> Batch:
        """Return a batch with the same number of rows that needs the most memory."""
        return batch

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the model with its initial weights, from the seed or from `model.weights`, whole, on the CPU."""
        ...

    def hooks(self, run: RunContext) -> list[Hook]:
        """Build the methods that act on this model, beside the balancer; none when they are off."""
        return []

    def save_assets(self, run_dir: Path, world: Group) -> None:
        """Save the tokenizer and other files that `export` needs beside the checkpoint."""
        return

    def checkpoint_extra(self) -> dict[str, Any]:
        """Return JSON values that an export needs to know of the data."""
        return {}

    @classmethod
    def inference_config(cls, config: Any) -> Any:
        """Return settings for evaluating a trained run, without what only training needs; a checkpoint has the
        weights."""
        return config

    @classmethod
    def require_readable(cls, rows: Rows, path: str, run_dir: Path, extra: Mapping[str, Any]) -> None:
        """Refuse rows that a trained model cannot read: their numbers mean something else than those it has learned.

        Args:
            rows: of the data set.
            path: where it lies, for messages.
            run_dir: the model's, with what `save_assets` wrote.
            extra: of its checkpoint, with what `checkpoint_extra` gave.

        Raises:
            RefusedError: another vocabulary, say.
        """
        return


def find_upstream(config: Config) -> type[Upstream]:
    """The class of the run's upstream; torchvision and timm are imported for images only."""
    assert isinstance(config, PretrainConfig)
    upstream: type[Upstream] = find("upstream", config.upstream).load()
    return upstream


def build_upstream(config: Config, environment: Environment) -> Upstream:
    """Open the data and choose model and objective."""
    upstream: Upstream = find_upstream(config)(config, environment)
    return upstream


def open_sources(config: Config, *, rank: int, world: int, device_type: str = "cpu") -> Sources:
    """Open a run's data on one rank, as its upstream does.

    Args:
        config: the run.
        rank, world: place in, and size of, the data-parallel group.
        device_type: "cuda" pins the batches' memory.

    Raises: as `Upstream.open_rows`, and RefusedError for settings that do not fit the number of ranks.
    """
    return find_upstream(config).open_sources(config, rank=rank, world=world, device_type=device_type)
