"""Upstreams: the data, model and objective of a pre-training run, one class for each kind of objective."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights
from trp_scale.checkpoint.initial_weights import GivenWeights, Load, give_weights, is_run, read_given_weights, reading
from trp_scale.config import Config, PretrainConfig, RefusedError, count_steps
from trp_scale.config.loader import check
from trp_scale.config.registry import find
from trp_scale.config.run_flags import recorded_sizes
from trp_scale.core.batch import Batch, WindowSource
from trp_scale.core.hooks import Hook
from trp_scale.core.run import Objective, RunContext
from trp_scale.data import sources as data_sources
from trp_scale.data.sources import OpenLabelled, Rows, Sources
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Properties of a data set that shapes depend on.

    Attributes:
        length: word pieces per sequence; 0 = the model's maximum.
        segments: maximum segments of a packed row; 0 = not packed.
        vocabulary: number of word pieces.
        classes: number of classes of each modality's maps, where it has classes.
    """

    length: int = 0
    segments: int = 0
    vocabulary: int = 30522
    classes: Mapping[str, int] = field(default_factory=lambda: {"semseg": 133})


COUNTED_ROWS = 16
"""Rows for which FLOPs are counted: enough to neglect work that does not grow with rows, such as AdPE's tables."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Description of a run without its data, from which memory and FLOPs are counted.

    Attributes:
        model: makes the model.
        objective: computes the task losses of a batch.
        rows: makes a dummy batch of a number of rows, with the shapes and types of real batches.
        step_rows: rows per step on all ranks.
        positions: sequence positions per row.
        spared_flops: FLOPs of a forward pass over a batch that are counted, but that kernels for local attention and
            packed rows leave out.
    """

    model: Callable[[], nn.Module]
    objective: Objective
    rows: Callable[[int], Batch]
    step_rows: int
    positions: int
    spared_flops: Callable[[Batch], float] = lambda batch: 0.0

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of a forward pass over the rows of a step, without those of hooks."""
        rows = self.rows(COUNTED_ROWS)
        batch = rows.to(torch.device("meta"))
        counted = count_flops(self.model, lambda model: self.objective(model, batch))
        return (counted - self.spared_flops(rows)) / batch.rows * self.step_rows

    def step_flops(self, ranks: int) -> float:
        """Return the model FLOPs of a training step on all `ranks` ranks."""
        return TRAINING_OVER_FORWARD * self.forward_flops


class Upstream(Protocol):
    """Upstream task: interface and defaults.

    Attributes:
        exports: {library: "module:function" that writes a checkpoint for it} (checkpoint/export.py: `Writer`).
        sources: named streams of rows.
        source: stream of global batches: `sources.train`, unless a step learns from two sources.
        objective: computes the task losses of a batch.
        positions_per_step: sequence positions per step on all ranks, with padding.
        open_rows: function of (config, [MemberPath, ...]) that opens data sets. Raises DataError if data is missing,
            damaged or in another format, or if the members of a mixture differ; RefusedError for data of another kind,
            or settings that contradict the data or each other.
        resumes: whether a checkpoint will replace the initial weights, so that `model.weights` is not read.
        weights_message: differences between `model.weights` and the model that started from it.
    """

    resumes: bool = False
    weights_message: str = ""
    exports: ClassVar[Mapping[str, str]]
    open_rows: ClassVar[Callable[..., Rows]]
    config: Any
    sources: Sources
    source: WindowSource
    objective: Objective
    positions_per_step: int

    def __init__(self, config: Any, environment: Environment) -> None: ...

    @classmethod
    def open_sources(cls, config: Any, *, rank: int, world: int, device_type: str = "cpu") -> Sources:
        """Open a run's data on one rank (see `open_sources`)."""
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
        """Open this rank's part of the data, with at most one worker per CPU."""
        rank, world = environment.data.rank, environment.data.size
        config = data_sources.within_cpus(config, environment.cpus)
        return cls.open_sources(config, rank=rank, world=world, device_type=environment.device.type)

    @staticmethod
    def open_labelled(config: Any, *, rank: int, world: int, pin: bool) -> OpenLabelled | None:
        """Return the function that splits labelled rows off the data (data/sources.py), or `None`."""
        return None

    @classmethod
    def facts(cls, config: Any) -> DataFacts:
        """Read the facts of the data set at `data.path`. Raises the same as `open_rows`."""
        return DataFacts()

    @classmethod
    def outline(cls, config: Any, facts: DataFacts) -> Outline:
        """Describe the run without its data, for `trp-scale plan`."""
        raise RefusedError(
            f"--upstream {config.upstream} cannot be planned: {cls.__name__} has no method `outline`, which describes "
            "a run without its data; allowed: an upstream of the package, or one with this method"
        )

    @classmethod
    def read_sizes(cls, config: Any) -> dict[tuple[str, str], Any]:
        """Return the settings (section, field) that fit `model.weights`. Raises RefusedError: they cannot be read."""
        path = Path(named_weights(config.model.weights)[0])
        if is_run(path):
            stored = read_document(find_checkpoint(path)).config
            return recorded_sizes(stored) if stored.get("upstream") == config.upstream else {}
        source = read_given_weights(config.model.weights)
        with reading(source.where):
            return cls.sizes_from_weights(config, source)

    @classmethod
    def sizes_from_weights(cls, config: Any, source: GivenWeights) -> dict[tuple[str, str], Any]:
        """Return the settings that fit weights of another library."""
        return {}

    def start_from_weights(self, model: nn.Module, load: Load[Any]) -> None:
        """Load `model.weights`, if it is set and no checkpoint replaces it; `load` converts another library's."""
        settings = self.config.model
        if settings.weights and not self.resumes:
            self.weights_message = give_weights(model, settings, load)

    @property
    @abstractmethod
    def step_flops(self) -> float:
        """Model FLOPs of a training step on all ranks."""
        ...

    def worst_case_batch(self, batch: Batch) -> Batch:
        """Return a batch with as many rows that needs the most memory."""
        return batch

    def shapes(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch of every shape that micro-batches with as many rows have, the largest first."""
        yield batch

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the unsharded model on the CPU, with initial weights from the seed or from `model.weights`."""
        ...

    def hooks(self, run: RunContext) -> list[Hook]:
        """Build the hooks of this run, without the balancer."""
        return []

    def save_assets(self, run_dir: Path, world: Group) -> None:
        """Save the tokenizer and other files that `export` needs in the run directory."""
        return

    def checkpoint_extra(self) -> dict[str, Any]:
        """Return JSON values about the data that `export` and evaluation need."""
        return {}

    @classmethod
    def inference_config(cls, config: Any) -> Any:
        """Return settings for evaluating a trained run, without those that only training needs."""
        return config

    @classmethod
    def require_readable(cls, rows: Rows, path: str, run_dir: Path, extra: Mapping[str, Any]) -> None:
        """Raise RefusedError for rows whose numbers have another meaning than in training, as by another vocabulary.

        Args:
            path: path of the data set, for messages.
            run_dir: directory of the model's run, with the files of `save_assets`.
            extra: the values of `checkpoint_extra` in its checkpoint.
        """
        return


def find_upstream(config: Config) -> type[Upstream]:
    """Return the class of the run's upstream; torchvision and timm are imported for images only."""
    assert isinstance(config, PretrainConfig)
    upstream: type[Upstream] = find("upstream", config.upstream).load()
    return upstream


def build_upstream(config: Config, environment: Environment) -> Upstream:
    """Build the run's upstream, which opens its data."""
    upstream: Upstream = find_upstream(config)(config, environment)
    return upstream


def set_length(config: Config) -> None:
    """Set training.steps from training.epochs if it is not 0, and check the settings again. Raises the same as
    `Upstream.open_rows`, and RefusedError for settings that do not fit the number of steps."""
    if isinstance(config, PretrainConfig) and config.training.epochs:
        alone = copy.deepcopy(config)
        alone.data.workers, alone.batch.micro_size = 0, alone.batch.global_size
        sources = open_sources(alone, rank=0, world=1)
        sources.close()
        config.training.steps = count_steps(config.training.epochs, sources.train.rows, config.batch.global_size)
        check(config)


def open_sources(config: Config, *, rank: int, world: int, device_type: str = "cpu") -> Sources:
    """Open a run's data on one rank of the data-parallel group; "cuda" pins the batches' memory.

    Raises the same as `Upstream.open_rows`, and RefusedError for settings that contradict the number of ranks.
    """
    return find_upstream(config).open_sources(config, rank=rank, world=world, device_type=device_type)
