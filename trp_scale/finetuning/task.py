"""Base classes of downstream tasks, their data sources, and sampling of few-shot training rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trp_scale.checkpoint.initial_weights import naming_tensors
from trp_scale.config import RefusedError, count_steps
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.registry import find
from trp_scale.core.batch import Batch, TaskLosses, membership
from trp_scale.core.run import Objective
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, mix, stream
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import Addresses, Blocks, HeldOutPlan, Plan, TrainPlan, held_out, row_identities
from trp_scale.data.sources import Chosen, Rows, Sources, TrainSource, ValidationSource, within_cpus
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.encoders import load_weights, open_encoder
from trp_scale.finetuning.groups import GroupAccuracy, GroupedBuilder, Groups
from trp_scale.finetuning.measurement import Metrics, Predictions, all_blocks
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops
from trp_scale.pretraining.base import Upstream
from trp_scale.reporting.results import SeedResult

if TYPE_CHECKING:
    from trp_scale.models.vit import OnImageEncoder


class TaskObjective(Objective):
    """Shared parts of objectives: one balanced task, averaged over rows, or a task for each group of rows."""

    tasks: tuple[str, ...]
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = ()
    by_group = False

    def balance_groups(self, groups: Groups) -> None:
        """Make each group a task."""
        self.tasks, self.balanced, self.by_group = groups.names, tuple(range(len(groups.names))), True

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of rows of each task without padding, [T] float64."""
        weights = batch["row_weights"].double()
        return self._in_groups(batch, weights).sum(0) if self.by_group else weights.sum().reshape(1)

    def sum_rows(self, losses: torch.Tensor, batch: Batch) -> TaskLosses:
        """Return the sums, [T] float64, of the losses of rows, [R], and their numbers."""
        losses, weights = losses.double(), batch["row_weights"].double()
        sums = losses @ self._in_groups(batch, weights) if self.by_group else (losses @ weights).reshape(1)
        return TaskLosses(sums=sums, counts=self.count(batch))

    def _in_groups(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        return membership(batch["groups"], len(self.tasks)) * weights[:, None]  # [R, T]


Run = TypeVar("Run", bound=FinetuneConfig)
ImageRun = TypeVar("ImageRun", bound=ImageTaskConfig)


class DownstreamTask(Upstream, Generic[Run]):
    """Data, model, objective and metrics of fine-tuning; an upstream whose data are opened by its class.

    Attributes:
        name: in tables.
        metric: main metric, a key of `metrics`; higher is better unless lower_is_better.
        split: of the measured rows: dev, test or held_out.
        unlabelled: why the measured rows have no labels; "" if they have labels.
        pictures: "module:function" that draws predictions (evaluation/figures/represent.py: DrawRuns), or "".
        groups: of the rows; `None` without.
    """

    pictures: ClassVar[str] = ""
    name: str
    metric: str
    lower_is_better = False
    unlabelled = ""
    groups: Groups | None = None

    def __init__(self, config: Run, sources: Sources) -> None:
        self.config, self.sources, self.source = config, sources, sources.train
        self.split: str = config.downstream.split
        set_length(config, sources.train.rows)

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a training step on all ranks; 0.0 if the task does not count them."""
        return 0.0

    @abstractmethod
    def predict(self, forward: Callable[..., Any], batch: Batch) -> Any:
        """Return the outputs for a micro-batch that `metrics` and `predictions` collect."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Return an empty collector of metrics."""

    def use_groups(self, groups: Groups | None, objective: TaskObjective) -> None:
        """Report by group, and balance the losses of the groups if the balancer is not uniform."""
        self.groups = groups
        if groups is not None and self.config.balancer.kind != "uniform":
            objective.balance_groups(groups)

    def report_groups(self, metrics: Metrics) -> Metrics:
        """Return metrics that also report groups if there are any."""
        return metrics if self.groups is None else GroupAccuracy(metrics, self.groups)

    def restore_extra(self, extra: Mapping[str, Any]) -> None:
        """Restore the values that `checkpoint_extra` stored: the training data may no longer exist."""

    def predictions(self, directory: Path, group: Group) -> Predictions:
        """Return a collector that writes the predictions for the measured rows.

        Args:
            directory: of the files, shared with other tasks.
            group: ranks that predict; its rank 0 writes.

        Raises:
            RefusedError: the task does not support it.
        """
        raise RefusedError(
            f"--predictions {directory}: --downstream.kind {self.config.downstream.kind} cannot save predictions; "
            f"define the method `predictions` of {type(self).__name__}"
        )

    @classmethod
    def measure_on(cls, config: Run, checkpoint: Path, data: str, images: str) -> None:
        """Change the settings of a finished run in place, to measure it again.

        Args:
            checkpoint: of the run. Its pre-trained encoder may no longer exist.
            data: data set to measure on; "" = that of the run.
            images: folder of the images of `data`, for detection; else "".

        Raises:
            RefusedError: `images` with another task.
        """
        if images:
            raise RefusedError(f"--images {images} is for detection; the run's task is {config.downstream.kind}")
        config.model.weights = ""
        config.data.path = data or config.data.path


def image_step_flops(config: ImageTaskConfig, make_model: Callable[[], nn.Module]) -> float:
    """Return the FLOPs of a training step on all ranks for a model whose inputs are crops [B, 3, S, S]."""
    crop = torch.empty(1, 3, config.crops.size, config.crops.size, device="meta")
    return TRAINING_OVER_FORWARD * config.batch.global_size * count_flops(make_model, lambda model: model(crop))


class ImageTask(DownstreamTask[ImageRun]):
    """Shared parts of image tasks."""

    def __init__(self, config: ImageRun, sources: Sources) -> None:
        super().__init__(config, sources)
        self.name = config.downstream.task or config.downstream.kind
        self.positions_per_step = config.batch.global_size * config.grid**2

    @classmethod
    def measure_on(cls, config: ImageRun, checkpoint: Path, data: str, images: str) -> None:
        super().measure_on(config, checkpoint, "", images)
        if data:
            config.downstream.test_path, config.downstream.split = data, "test"
            if not has_training_data(config):
                config.data.path = data

    @property
    def measured_plan(self) -> Plan:
        plan = self.sources.validation.plan
        assert plan is not None, "measured rows have a plan"
        return plan

    def take_encoder(self, model: OnImageEncoder, *, last_norm: bool = True) -> None:
        """Load the encoder of --from into a model, with or without its last norm; no-op for scratch."""
        if (path := self.config.model.weights) and path != SCRATCH:
            weights = open_encoder(path).image_weights(self.config)
            if not last_norm:
                weights = {name: tensor for name, tensor in weights.items() if not name.startswith("norm.")}
            for name, parameter in model.encoder.named_parameters():
                if name.endswith("position_bias.table"):  # starts at zero; pre-training has none
                    weights.setdefault(name, torch.zeros(parameter.shape))
            with naming_tensors(self.config.model):
                load_weights(model.encoder, weights, f"--from {path}")


def has_training_data(config: ImageTaskConfig) -> bool:
    """Return whether the run's training data still exists."""
    return all((member.path / "dataset.json").is_file() for member in parse_paths(config.data.path))


def set_length(config: FinetuneConfig, rows: int) -> None:
    """Set training.steps from downstream.epochs, and optimizer.warmup_steps from warmup_share. Raises RefusedError:
    the schedule does not fit them."""
    downstream = config.downstream
    if downstream.epochs > 0:
        config.training.steps = count_steps(downstream.epochs, rows, config.batch.global_size)
    if downstream.warmup_share > 0:
        config.optimizer.warmup_steps = round(downstream.warmup_share * config.training.steps)
    if problems := list(config.optimizer.problems(config)):
        raise RefusedError("\n".join(problems))


def open_task_sources(
    config: FinetuneConfig,
    environment: Environment,
    train: Rows,
    measured: Rows,
    *,
    train_paths: Sequence[MemberPath],
    measured_paths: Sequence[MemberPath] | None,
    learned: Sequence[npt.NDArray[np.bool_]] | None = None,
    groups: Groups | None = None,
) -> Sources:
    """Return sources that yield training rows endlessly, and each measured row once in stored order.

    Args:
        train: rows with augmentation, and with labels if downstream.rows samples by label.
        measured: rows without augmentation.
        train_paths: data sets of `train`.
        measured_paths: data sets of `measured`, which are measured as a whole. `None` = the data sets of `train`, of
            which the share data.validation_fraction is held out and measured.
        learned: masks [n] of blocks that may be trained on; `None` = all.
        groups: of the batches' field `groups`; `None` without.

    Raises:
        RefusedError: a data set has no rows left to train on, or rows that need a group have none.
    """
    config = within_cpus(config, environment.cpus)
    held = config.data.validation_fraction if measured_paths is None else 0.0
    chosen = select_training_blocks(train.blocks, train_paths, held)
    kept = [~mask for mask in chosen] if measured_paths is None else all_blocks(measured.blocks)
    balanced = groups is not None and getattr(config.downstream, "group_sampling", "rows") == "balanced"
    if groups is not None:
        groups.require(select_groups(measured, kept), "measured")
        if balanced or config.balancer.kind != "uniform":
            groups.require(select_groups(train, chosen), "training")
    if learned is not None:
        chosen = [mask & may for mask, may in zip(chosen, learned, strict=True)]
    for mask, path in zip(chosen, train_paths, strict=True):
        if not mask.any():
            raise RefusedError(
                f"{path.path}: no training rows remain after held-out and skipped rows; lower "
                "--data.validation_fraction, or set --downstream.test_path"
            )
    learned_from, paths = train, train_paths
    if groups is not None and balanced:
        learned_from, paths = sample_groups(train, chosen, groups)
        chosen = all_blocks(learned_from.blocks)
    if config.downstream.rows:
        learned_from = sample_rows(train, chosen, config.downstream.rows, seed=config.training.seed)
        chosen = all_blocks(learned_from.blocks)
    plan = TrainPlan(
        seed=config.training.seed,
        members=learned_from.members(paths, chosen),
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


def select_training_blocks(
    blocks: Sequence[Blocks], paths: Sequence[MemberPath], fraction: float
) -> list[npt.NDArray[np.bool_]]:
    """Return masks [n] of the blocks that are not held out; `fraction` is 0 with a separate test set."""
    return [
        ~held_out(table.identities, fraction, where=str(path.path)) for table, path in zip(blocks, paths, strict=True)
    ]


def task_class(config: FinetuneConfig) -> type[DownstreamTask[Any]]:
    """Import the class of `downstream.kind`."""
    kind: type[DownstreamTask[Any]] = find("task", config.downstream.kind, "downstream.kind").load()
    return kind


def build_task(config: FinetuneConfig, environment: Environment, *, figures: bool = True) -> DownstreamTask[Any]:
    """Open the task's data, and set the settings that follow from it in place.

    Args:
        figures: metrics are computed, which needs labels; otherwise only predictions.

    Raises:
        DataError: the data is missing, damaged or of another format.
        RefusedError: the settings do not fit the data or each other, or labels are missing.
    """
    build: Callable[[FinetuneConfig, Environment], DownstreamTask[Any]] = task_class(config)  # type: ignore[assignment]
    task = build(config, environment)
    if figures and task.unlabelled:
        task.sources.close()
        raise RefusedError(task.unlabelled)
    return task


def seed_result(task: DownstreamTask[Any], seed: int, metrics: dict[str, Any], **fields: Any) -> SeedResult:
    """Return the result of one run; `fields` are further fields of `SeedResult`."""
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
class SampledRows:
    """Sampled rows of a data set, each as a block of one row, so that single rows are shuffled; see `plan.Blocks`.

    Attributes:
        identities: [n] of the rows; equal to their identities in the whole data set.
        block, row: [n] stored block, and row within it.
        member: [n] number of the data set.
    """

    identities: Words
    block: Integers
    row: Integers
    member: Integers

    def take(self, rows: Integers) -> SampledRows:
        """Select rows by their numbers [m]."""
        return SampledRows(**{name: values[rows] for name, values in vars(self).items()})

    @property
    def keys(self) -> Sequence[str]:
        return [f"{block}/{row}" for block, row in zip(self.block.tolist(), self.row.tolist(), strict=True)]

    @property
    def rows(self) -> Integers:
        return np.ones(len(self.block), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class SampledRowsBuilder(BatchBuilder):
    """Builds batches of sampled rows with the builder of the whole data sets; see `fetch.BatchBuilder`."""

    builder: BatchBuilder
    chosen: Sequence[SampledRows]

    def build(self, addresses: Addresses, start: int) -> Batch:
        block, row, member = (np.zeros_like(addresses.block) for _ in range(3))
        for number, chosen in enumerate(self.chosen):
            here = addresses.present & (addresses.member == number)
            stored = addresses.block[here]
            block[here], row[here], member[here] = chosen.block[stored], chosen.row[stored], chosen.member[stored]
        return self.builder.build(replace(addresses, block=block, row=row, member=member), start)


def select_groups(rows: Rows, chosen: Sequence[Chosen]) -> Integers:
    """Return the groups of the rows of the chosen blocks, [n] in stored order."""
    assert isinstance(rows.builder, GroupedBuilder)
    tables = zip(rows.builder.numbers, chosen, rows.blocks, strict=True)
    return np.concatenate([numbers[mask[_block_of_rows(blocks)]] for numbers, mask, blocks in tables])


def sample_groups(whole: Rows, allowed: Sequence[Chosen], groups: Groups) -> tuple[Rows, list[MemberPath]]:
    """Return the rows of the allowed blocks as a mixture with a member of equal weight for each group."""
    table, may = list_rows(whole.blocks, allowed)
    numbers = select_groups(whole, all_blocks(whole.blocks))
    chosen, paths = [], []
    for number, name in enumerate(groups.names):
        rows = np.flatnonzero(may & (numbers == number))
        if len(rows):
            chosen.append(table.take(rows))
            paths.append(MemberPath(name=name, weight=Fraction(1), path=Path(groups.source)))
    return replace_rows(whole, chosen), paths


def sample_rows(whole: Rows, allowed: Sequence[Chosen], count: int, *, seed: int) -> Rows:
    """Sample `count` rows of the allowed blocks by the seed, stratified by label if `whole` has labels.

    A larger sample contains a smaller one, up to rounding.

    Raises:
        RefusedError: fewer rows exist, or a data set gets none.
    """
    table, may = list_rows(whole.blocks, allowed)
    labels = np.zeros(len(may), np.int64) if whole.labels is None else np.concatenate(whole.labels)
    usable = np.flatnonzero(may)
    if count > len(usable):
        raise RefusedError(
            f"--downstream.rows is {count}, allowed: at most the {len(usable)} training rows, or 0 for all"
        )
    drawn = mix(table.identities[usable] ^ np.uint64(stream(seed, "few rows")))
    usable = usable[np.lexsort((drawn, labels[usable]))]  # by label, then in random order
    _, sizes = np.unique(labels[usable], return_counts=True)
    rank = np.arange(len(usable)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a row within its label
    picked = np.sort(usable[rank < np.repeat(label_counts(sizes, count), sizes)])
    chosen = [table.take(picked[table.member[picked] == number]) for number in range(len(whole.blocks))]
    if empty := [number for number, rows in enumerate(chosen) if not len(rows.block)]:
        raise RefusedError(
            f"--downstream.rows is {count}: data set {empty[0]} of the mixture gets no row; allowed: more rows"
        )
    return replace_rows(whole, chosen)


def replace_rows(whole: Rows, chosen: list[SampledRows]) -> Rows:
    """Return sampled rows with the builder of the whole data sets."""
    builder = SampledRowsBuilder(builder=whole.builder, chosen=chosen)
    return replace(whole, blocks=chosen, builder=builder, labels=None, stored=())


def label_counts(sizes: Integers, count: int) -> Integers:
    """Split `count` over labels in proportion to `sizes` [C], by largest remainders; returns [C]."""
    exact = count * sizes / sizes.sum()
    rows: Integers = np.floor(exact).astype(np.int64)
    rows[np.argsort(rows - exact, kind="stable")[: count - rows.sum()]] += 1
    return rows


def _block_of_rows(blocks: Blocks) -> Integers:
    numbers: Integers = np.repeat(np.arange(len(blocks.rows)), blocks.rows)
    return numbers


def list_rows(tables: Sequence[Blocks], allowed: Sequence[Chosen]) -> tuple[SampledRows, Chosen]:
    """Return all rows of the data sets in stored order, and whether each is in an allowed block, [n]."""
    columns = []
    for number, (blocks, mask) in enumerate(zip(tables, allowed, strict=True)):
        counts = np.asarray(blocks.rows, dtype=np.int64)
        block = _block_of_rows(blocks)
        row = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        identities = row_identities(np.asarray(blocks.identities)[block], row)
        columns.append((identities, block, row, np.full(len(block), number), mask[block]))
    identities, block, row, member, may = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return SampledRows(identities=identities, block=block, row=row, member=member), may
