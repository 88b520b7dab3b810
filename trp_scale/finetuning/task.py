"""Downstream tasks: their base, their data, and fine-tuning on a few rows of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trp_scale.checkpoint.initial_weights import naming_tensors
from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.registry import find
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook
from trp_scale.core.objective import Objective
from trp_scale.core.run import RunContext
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, mix, stream
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import Addresses, Blocks, HeldOutPlan, Plan, TrainPlan, row_identities
from trp_scale.data.sources import Chosen, Rows, Sources, ValidationSource, within_cpus
from trp_scale.data.split import held_out
from trp_scale.data.train_source import TrainSource
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.encoders import open_encoder, take_weights
from trp_scale.finetuning.measurement import Metrics, Predictions, every_block
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops
from trp_scale.reporting.results import SeedResult

if TYPE_CHECKING:
    from trp_scale.models.image_encoder import OnImageEncoder


class TaskObjective:
    """Shared parts of the objectives: one balanced task, whose elements are the rows that are there."""

    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = ()
    in_a_graph = True

    def count(self, batch: Batch) -> torch.Tensor:
        """[1] float64, rows that are there."""
        return batch["row_weights"].double().sum().reshape(1)

    def outside_weights(self, counts: torch.Tensor) -> torch.Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)


Run = TypeVar("Run", bound=FinetuneConfig)
ImageRun = TypeVar("ImageRun", bound=ImageTaskConfig)


class DownstreamTask(ABC, Generic[Run]):
    """A task to fine-tune on: what a run asks of an upstream (pretraining/base.py), and how its figures are measured.

    Attributes:
        name: in tables.
        metric: the figure of `metrics` that the task is judged by; higher is better unless lower_is_better.
        lower_is_better: of the metric.
        split: what the measured rows are: dev or test.
        unlabelled: why no figure can be given of the measured rows, whose labels are kept back; "": they have them.
        pictures: "module:function" that draws predictions (evaluation/figures/represent.py: DrawRuns);
            "" if there is none.
        positions_per_step: sequence positions of a step on all ranks, padding included.
    """

    pictures: ClassVar[str] = ""
    name: str
    metric: str
    lower_is_better = False
    unlabelled = ""
    objective: Objective
    positions_per_step: int

    def __init__(self, config: Run, sources: Sources) -> None:
        self.config, self.sources, self.source = config, sources, sources.train
        self.split: str = config.downstream.split
        set_length(config, sources.train.rows)

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a training step on all ranks; 0.0 of a task that does not count them."""
        return 0.0

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model with its initial weights, whole, on the CPU."""

    @abstractmethod
    def predict(self, forward: Callable[..., Any], batch: Batch) -> Any:
        """Return the outputs of one micro-batch for the metrics, from a forward pass without gradients."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Return an empty collection."""

    def worst_case_batch(self, batch: Batch) -> Batch:
        return batch

    def hooks(self, run: RunContext) -> list[Hook]:
        return []

    def save_assets(self, run_dir: Path, world: Group) -> None:
        """Store nothing: the settings describe the model."""

    def checkpoint_extra(self) -> dict[str, Any]:
        return {}

    def recall(self, extra: Mapping[str, Any]) -> None:
        """Take what `checkpoint_extra` gave to a trained run's checkpoint: rows that it learned from may be gone."""

    def predictions(self, directory: Path, group: Group) -> Predictions:
        """Return a writer of the predictions for the measured rows.

        Args:
            directory: for the files; other tasks may have theirs there.
            group: ranks that predict; its rank 0 writes.

        Raises:
            RefusedError: the task has no form for them.
        """
        raise RefusedError(
            f"--predictions {directory}: --downstream.kind {self.config.downstream.kind} has no form for saved "
            f"predictions; {type(self).__name__} can bring one by a method `predictions`"
        )

    @classmethod
    def measure_on(cls, config: Run, checkpoint: Path, data: str, images: str) -> None:
        """Change the settings of a run that has ended so that it is measured, in place.

        Args:
            checkpoint: of the run. What it was pre-trained from may be gone.
            data: what is measured, all of it; "" = what the run was measured on.
            images: folder of its images, where they lie apart; "" = they do not.

        Raises:
            RefusedError: the task's images lie nowhere else.
        """
        if images:
            raise RefusedError(f"--images {images} is for detection; the run's task is {config.downstream.kind}")
        config.model.weights = ""
        config.data.path = data or config.data.path


def image_step_flops(config: ImageTaskConfig, make_model: Callable[[], nn.Module]) -> float:
    """Return the model FLOPs of a training step on all ranks of a model of crops [B, 3, S, S]."""
    crop = torch.empty(1, 3, config.crops.size, config.crops.size, device="meta")
    return TRAINING_OVER_FORWARD * config.batch.global_size * count_flops(make_model, lambda model: model(crop))


class ImageTask(DownstreamTask[ImageRun]):
    """Shared parts of the tasks of images."""

    def __init__(self, config: ImageRun, sources: Sources) -> None:
        super().__init__(config, sources)
        self.name = config.downstream.task or config.downstream.kind
        self.positions_per_step = config.batch.global_size * config.grid**2

    @classmethod
    def measure_on(cls, config: ImageRun, checkpoint: Path, data: str, images: str) -> None:
        super().measure_on(config, checkpoint, "", images)
        if data:
            config.downstream.test_path, config.downstream.split = data, "test"
            if not trained_on_is_there(config):
                config.data.path = data

    @property
    def measured_plan(self) -> Plan:
        """Plan of the measured rows."""
        plan = self.sources.validation.plan
        assert plan is not None, "measured rows have a plan"
        return plan

    def take_encoder(self, model: OnImageEncoder, *, last_norm: bool = True) -> None:
        """Give a model the encoder of --from, if there is one.

        Args:
            last_norm: whether the model's encoder has one.
        """
        if (path := self.config.model.weights) and path != SCRATCH:
            weights = open_encoder(path).image_weights(self.config)
            if not last_norm:
                weights = {name: tensor for name, tensor in weights.items() if not name.startswith("norm.")}
            with naming_tensors(self.config.model):
                take_weights(model.encoder, weights, f"--from {path}")


def trained_on_is_there(config: ImageTaskConfig) -> bool:
    """Whether the data that a run has learned from is still in its place."""
    return all((member.path / "dataset.json").is_file() for member in parse_paths(config.data.path))


def set_length(config: FinetuneConfig, rows: int) -> None:
    """training.steps from the epochs, and the warm-up from its share of them, in place. Steps go across the end of an
    epoch: there is no short last batch."""
    downstream = config.downstream
    if downstream.epochs > 0:
        config.training.steps = max(1, math.ceil(downstream.epochs * rows / config.batch.global_size))
    if downstream.warmup_share > 0:
        config.optimizer.warmup_steps = round(downstream.warmup_share * config.training.steps)


def open_task_sources(
    config: FinetuneConfig,
    environment: Environment,
    train: Rows,
    measured: Rows,
    *,
    train_paths: Sequence[MemberPath],
    measured_paths: Sequence[MemberPath] | None,
    learned: Sequence[npt.NDArray[np.bool_]] | None = None,
) -> Sources:
    """The training rows in their endless order, and the measured rows once, in stored order.

    Args:
        train: builds training batches, augmented; with the labels by which downstream.rows are drawn evenly.
        measured: builds the batches that are measured.
        train_paths: of `train`.
        measured_paths: of `measured`, all of whose rows are measured; None = it is the same data as `train`, and what
            data.validation_fraction holds out is measured.
        learned: [n] of each data set, blocks that may be trained on; None = all.

    Raises:
        RefusedError: a data set has nothing left to train on.
    """
    config = within_cpus(config, environment.cpus)
    held = config.data.validation_fraction if measured_paths is None else 0.0
    chosen = blocks_to_learn(train.blocks, train_paths, held)
    kept = [~mask for mask in chosen] if measured_paths is None else every_block(measured.blocks)
    if learned is not None:
        chosen = [mask & may for mask, may in zip(chosen, learned, strict=True)]
    for mask, path in zip(chosen, train_paths, strict=True):
        if not mask.any():
            raise RefusedError(
                f"{path.path}: nothing is left to train on, beside what is held out to be measured or left out; lower "
                "--data.validation_fraction, or give --downstream.test_path"
            )
    learned_from = train
    if config.downstream.rows:
        learned_from = draw_rows(train, chosen, config.downstream.rows, seed=config.training.seed)
        chosen = every_block(learned_from.blocks)
    plan = TrainPlan(
        seed=config.training.seed,
        members=learned_from.members(train_paths, chosen),
        blocks_per_group=config.data.blocks_per_group,
    )
    seen = HeldOutPlan(members=measured.members(measured_paths or train_paths, kept))
    digests = train.digests if measured_paths is None else [*train.digests, *measured.digests]
    rank: dict[str, Any] = {
        "rank": environment.data.rank,
        "world": environment.data.size,
        "pin_memory": environment.device.type == "cuda",
    }
    return Sources(
        TrainSource(plan, learned_from.builder, config, stored=learned_from.stored, **rank),
        ValidationSource(seen, measured.builder, config, stored=measured.stored, **rank),
        replace(train, digests=digests),
    )


def blocks_to_learn(
    blocks: Sequence[Blocks], paths: Sequence[MemberPath], fraction: float
) -> list[npt.NDArray[np.bool_]]:
    """[n] of each data set, the blocks that are not held out to be measured.

    Args:
        fraction: data.validation_fraction; 0 where other data is measured.
    """
    return [
        ~held_out(table.identities, fraction, where=str(path.path)) for table, path in zip(blocks, paths, strict=True)
    ]


def task_class(config: FinetuneConfig) -> type[DownstreamTask[Any]]:
    """Return the class of `downstream.kind`; its module is imported now, since each has libraries of its own."""
    kind: type[DownstreamTask[Any]] = find("task", config.downstream.kind, "downstream.kind").load()
    return kind


def build_task(config: FinetuneConfig, environment: Environment, *, figures: bool = True) -> DownstreamTask[Any]:
    """Open the data of `downstream.kind`, and complete the settings that follow from them, in place.

    Args:
        figures: of the measured rows are wanted; False: predictions will do.

    Raises:
        DataError: the data is missing, damaged or of another format.
        RefusedError: settings that do not fit the data or each other, or measured rows without labels.
    """
    build: Callable[[FinetuneConfig, Environment], DownstreamTask[Any]] = task_class(config)  # type: ignore[assignment]
    task = build(config, environment)
    if figures and task.unlabelled:
        task.sources.close()
        raise RefusedError(task.unlabelled)
    return task


def seed_result(task: DownstreamTask[Any], seed: int, metrics: dict[str, Any], **fields: Any) -> SeedResult:
    """Return the result of one run of a task.

    Args:
        metrics: of `DownstreamTask.metrics`, with their `detail`.
        fields: others of the result, such as `settings`.
    """
    detail = metrics.pop("detail", {})
    return SeedResult(
        task=task.name,
        metric=task.metric,
        split=task.split,
        lower_is_better=task.lower_is_better,
        seed=seed,
        metrics=metrics,
        detail=detail,
        **fields,
    )


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Rows of one data set, each a block of its own, so that the order shuffles them all; see `plan.Blocks`.

    Attributes:
        identities: [n] of the rows; those of a single data set keep the keys that they have in the whole of it.
        block, row: [n] where each is stored.
    """

    identities: Words
    block: Integers
    row: Integers

    @property
    def keys(self) -> Sequence[str]:
        return [f"{block}/{row}" for block, row in zip(self.block.tolist(), self.row.tolist(), strict=True)]

    @property
    def rows(self) -> Integers:
        return np.ones(len(self.block), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ChosenRowsBuilder:
    """Makes batches of chosen rows by the builder of the whole data sets; see `fetch.BatchBuilder`."""

    builder: BatchBuilder
    chosen: Sequence[ChosenRows]

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        block, row = np.zeros_like(addresses.block), np.zeros_like(addresses.row)
        for member, chosen in enumerate(self.chosen):
            here = addresses.present & (addresses.member == member)
            block[here], row[here] = chosen.block[addresses.block[here]], chosen.row[addresses.block[here]]
        return self.builder.build(replace(addresses, block=block, row=row), start)


def draw_rows(whole: Rows, allowed: Sequence[Chosen], count: int, *, seed: int) -> Rows:
    """`count` rows of the data sets, each label's share as in all of them, drawn by the seed. Of two counts the larger
    one holds the smaller one's rows, but for rounding.

    Args:
        whole: the data sets; `labels` of each row, or None: of one kind.
        allowed: [n] of each data set, the blocks that rows may be taken from.
        count: rows in all.

    Raises:
        RefusedError: there are fewer.
    """
    identities, member, block, row = (np.concatenate(parts) for parts in zip(*_places(whole.blocks), strict=True))
    labels = np.zeros(len(block), np.int64) if whole.labels is None else np.concatenate(whole.labels)
    may = np.concatenate([mask[_block_of_rows(blocks)] for blocks, mask in zip(whole.blocks, allowed, strict=True)])
    usable = np.flatnonzero(may)
    if count > len(usable):
        raise RefusedError(
            f"--downstream.rows is {count}, allowed: at most the {len(usable)} training rows, or 0 for all"
        )
    drawn = mix(identities[usable] ^ np.uint64(stream(seed, "few rows")))
    usable = usable[np.lexsort((drawn, labels[usable]))]  # label by label, each in the order drawn
    _, sizes = np.unique(labels[usable], return_counts=True)
    rank = np.arange(len(usable)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a row among its label's
    picked = np.sort(usable[rank < np.repeat(label_counts(sizes, count), sizes)])
    chosen = [
        ChosenRows(identities=identities[rows], block=block[rows], row=row[rows])
        for rows in (picked[member[picked] == number] for number in range(len(whole.blocks)))
    ]
    if empty := [number for number, rows in enumerate(chosen) if not len(rows.block)]:
        raise RefusedError(
            f"--downstream.rows is {count}: none is of data set {empty[0]} of the mixture; allowed: more"
        )
    builder = ChosenRowsBuilder(builder=whole.builder, chosen=chosen)
    return replace(whole, blocks=chosen, builder=builder, labels=None, stored=())


def label_counts(sizes: Integers, count: int) -> Integers:
    """[C] rows of each label -> [C] of `count` rows, in proportion; what rounding leaves goes to the largest
    remainders."""
    exact = count * sizes / sizes.sum()
    rows: Integers = np.floor(exact).astype(np.int64)
    rows[np.argsort(rows - exact, kind="stable")[: count - rows.sum()]] += 1
    return rows


def _block_of_rows(blocks: Blocks) -> Integers:
    numbers: Integers = np.repeat(np.arange(len(blocks.rows)), blocks.rows)
    return numbers


def _places(tables: Sequence[Blocks]) -> list[tuple[Words, Integers, Integers, Integers]]:
    """Columns of each data set's rows in stored order, [n]: identity, number of the data set, block, row in it."""
    columns = []
    for number, blocks in enumerate(tables):
        counts = np.asarray(blocks.rows, dtype=np.int64)
        block = _block_of_rows(blocks)
        row = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        identities = row_identities(np.asarray(blocks.identities)[block], row)
        columns.append((identities, np.full(len(block), number), block, row))
    return columns
