"""Interface of a downstream task: all that a run needs (pretraining/base.py), and its measurement."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trp_scale.checkpoint.initial_weights import naming_tensors
from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.registry import find
from trp_scale.config.schema import is_within
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.images.dataset import ImageDataset, ImageMeta
from trp_scale.data.mixture import MemberPath, parse_paths
from trp_scale.data.plan import Blocks, HeldOutPlan, Plan, TrainPlan
from trp_scale.data.sources import Rows, Sources, ValidationSource, within_cpus
from trp_scale.data.split import held_out
from trp_scale.data.train_source import TrainSource
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError, UnreadableError, quote
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.encoders import open_encoder, take_encoder
from trp_scale.finetuning.row_subset import draw_rows
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops
from trp_scale.pretraining.base import Upstream
from trp_scale.reporting.results import SeedResult
from trp_scale.storage.files import atomic_write

if TYPE_CHECKING:
    from trp_scale.models.image_encoder import OnImageEncoder


class Predictions(Protocol):
    """Takes what a task predicts of the measured rows and writes it into files: rank 0 writes, whatever rank predicts.
    Rows that are only there to fill a batch are left out, so that any number of ranks writes the same."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the result of `Measured.predict` for a micro-batch. Collective."""
        ...

    def finish(self) -> list[Path]:
        """Write what is not written yet; returns the files, or the directory of many. Collective."""
        ...


def write_table(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]], *, separator: str) -> None:
    """Write a table with a header by `atomic_write`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        file = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
        file.detach()


def image_names(plan: Plan, datasets: Sequence[ImageDataset]) -> list[str]:
    """The key of each measured image, in the order of positions: of a folder that was sharded, its path in there
    without a suffix. Of a mixture MEMBER/KEY. Where a data set has a key several times, in several tars, TAR/KEY.

    Args:
        plan: of the measured rows.
        datasets: members of the mixture.

    Raises:
        DataError: an index is no longer there, or has a key that leads out of a folder.
    """
    addresses = plan.locate(np.arange(plan.rows))
    keys = [_keys(dataset) for dataset in datasets]
    names = []
    for member, block, row in zip(addresses.member, addresses.block, addresses.row, strict=True):
        names.append(keys[member][int(datasets[member].blocks.first[block]) + int(row)])
    return names


def _keys(dataset: ImageDataset) -> list[str]:
    """Keys of all images of a data set."""
    keys = dataset.samples.keys()
    wrong = next((key for key in keys if not is_within(key)), None)
    if wrong is not None:
        raise DataError(f"{dataset.directory}: an image has the key {quote(wrong)}, which names no file in a folder")
    if max(Counter(keys).values()) > 1:
        counts = np.diff(dataset.samples.starts).tolist()
        tars = [path.stem for path, count in zip(dataset.samples.shards, counts, strict=True) for _ in range(count)]
        keys = [f"{tar}/{key}" for tar, key in zip(tars, keys, strict=True)]
    return [f"{dataset.name}/{key}" for key in keys] if dataset.name else keys


class Collector(Protocol):
    """Takes what a task predicts, one micro-batch after another. All ranks have as many."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the result of `Measured.predict` for a micro-batch."""
        ...


class Metrics(Collector, Protocol):
    """Collects what one rank's rows say, then joins the ranks. Rows that are only there to fill a batch are left out,
    so that any number of ranks gives the same figures."""

    def finish(self, group: Group) -> dict[str, Any]:
        """Figures by name, the same on all ranks; under "detail" what a table has no place for (per class, say).
        Collective."""
        ...


class Measured(Protocol):
    """The part of a task that `measure` uses."""

    def predict(self, forward: Callable[..., Any], batch: Batch) -> Any:
        """Outputs of one micro-batch for the metrics, from a forward pass without gradients."""
        ...

    def metrics(self) -> Metrics:
        """An empty collection."""
        ...


class DownstreamTask(Measured, Upstream, Protocol):
    """A task to fine-tune on.

    Attributes:
        name: in tables.
        metric: the figure of `Metrics.finish` that the task is judged by; higher is better unless lower_is_better.
        lower_is_better: of the metric.
        split: what the measured rows are: dev or test.
        unlabelled: why no figure can be given of the measured rows, whose labels are kept back; "": they have them.
        pictures: "module:function" that draws predictions (evaluation/figures/represent.py: DrawRuns);
            "" if there is none.
    """

    pictures: ClassVar[str]
    name: str
    metric: str
    lower_is_better: bool
    split: str
    unlabelled: str

    def recall(self, extra: Mapping[str, Any]) -> None:
        """Take what the checkpoint of a trained run says of the rows that it has learned from, which may be gone.

        Args:
            extra: with what `checkpoint_extra` gave.
        """
        ...

    def predictions(self, directory: Path, group: Group) -> Predictions:
        """Return a writer of the predictions for the measured rows.

        Args:
            directory: for the files; other tasks may have theirs there.
            group: ranks that predict; its rank 0 writes.

        Raises:
            RefusedError: the task has no form for them.
        """
        ...


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


class TaskParts(Generic[Run]):
    """Shared parts of the tasks, without data, model, objective and metrics."""

    pictures: ClassVar[str] = ""
    lower_is_better = False
    unlabelled = ""
    positions_per_step: int

    def __init__(self, config: Run, sources: Sources) -> None:
        self.config = config
        self.sources = sources
        self.source = sources.train
        self.split = config.downstream.split
        set_length(config, sources.train.rows)

    def worst_case_batch(self, batch: Batch) -> Batch:
        return batch

    def hooks(self, run: RunContext) -> list[Hook]:
        return []

    def save_assets(self, run_dir: Path, world: Group) -> None:
        """Store nothing: the settings describe the model."""

    def checkpoint_extra(self) -> dict[str, Any]:
        return {}

    def recall(self, extra: Mapping[str, Any]) -> None:
        """Ignore it: this task needs none."""

    def predictions(self, directory: Path, group: Group) -> Predictions:
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


class ImageTask(TaskParts[ImageRun]):
    """Shared parts of the tasks of images."""

    @property
    def step_flops(self) -> float:
        """0.0, of a task that does not count them."""
        return 0.0

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
                take_encoder(model.encoder, weights, path)


def rows_from_images(
    datasets: Sequence[ImageDataset],
    meta: ImageMeta,
    builder: BatchBuilder,
    labels: list[npt.NDArray[np.int64]] | None = None,
) -> Rows:
    """Return the rows of image data sets with a builder of their batches."""
    return Rows(
        blocks=[dataset.blocks for dataset in datasets],
        meta=meta,
        limit=0,
        builder=builder,
        digests=[dataset.digest() for dataset in datasets],
        labels=labels,
        stored=datasets,
    )


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
    data, pin = environment.data, environment.device.type == "cuda"
    config = within_cpus(config, environment.cpus)
    everything = [np.ones(len(blocks.rows), dtype=np.bool_) for blocks in train.blocks]
    chosen, kept = everything, everything
    if measured_paths is None:
        chosen = blocks_to_learn(train.blocks, train_paths, config.data.validation_fraction)
        kept = [~mask for mask in chosen]
    else:
        kept = [np.ones(len(blocks.rows), dtype=np.bool_) for blocks in measured.blocks]
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
        chosen = [np.ones(len(blocks.rows), dtype=np.bool_) for blocks in learned_from.blocks]
    plan = TrainPlan(
        seed=config.training.seed,
        members=learned_from.members(train_paths, chosen),
        blocks_per_group=config.data.blocks_per_group,
    )
    seen = HeldOutPlan(members=measured.members(measured_paths or train_paths, kept))
    digests = train.digests if measured_paths is None else [*train.digests, *measured.digests]
    return Sources(
        TrainSource(
            plan,
            learned_from.builder,
            config,
            rank=data.rank,
            world=data.size,
            pin_memory=pin,
            stored=learned_from.stored,
        ),
        ValidationSource(
            seen, measured.builder, config, rank=data.rank, world=data.size, pin_memory=pin, stored=measured.stored
        ),
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


def measure(engine: Engine, task: Measured, windows: Iterable[Batch]) -> dict[str, Any]:
    """The task's figures over measured rows. Collective; the same on all ranks.

    Raises:
        RefusedError: rows that cannot be read: a figure is that of all rows, or none.
    """
    collected = task.metrics()
    predict(engine, task, windows, [collected])
    return collected.finish(engine.data_group)


def predict(engine: Engine, task: Measured, windows: Iterable[Batch], collectors: Sequence[Collector]) -> None:
    """Hand what the task predicts of all measured rows to the collectors. Collective.

    Raises:
        RefusedError: rows that cannot be read.
    """
    corrupt: dict[str, str] = {}
    engine.train(False)
    with torch.no_grad():
        for batch in windows:
            corrupt.update((key, batch.reasons.get(key, "")) for key in batch.corrupt)
            on_device = batch.to(engine.device)
            outputs = task.predict(engine, on_device)
            for collector in collectors:
                collector.add(outputs, on_device)
    engine.train(True)
    refuse_unread(corrupt, engine.data_group)


def refuse_unread(corrupt: Mapping[str, str], group: Group) -> None:
    """A figure is that of all rows, or none. Collective.

    Args:
        corrupt: why some of this rank's could not be read, by their names.

    Raises:
        UnreadableError: there are any, on whatever rank.
    """
    if unread := sorted(set().union(*group.gather_objects(set(corrupt)))):
        raise UnreadableError(
            f"{len(unread)} of the measured samples cannot be read ({', '.join(unread[:3])}), and the metric is that "
            "of all; copy or shard the data again"
        )


def distinct(classes: Sequence[str]) -> list[str]:
    """Names of the classes, with their number where two have the same (ImageNet has two cranes): tables go by name."""
    counts = Counter(classes)
    return [name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(classes)]


class GatheredRows:
    """Per-row outputs of all ranks, in stored order: what metrics over whole sets of predictions need."""

    def __init__(self) -> None:
        self._positions: list[np.ndarray] = []
        self._arrays: dict[str, list[np.ndarray]] = {}

    def add(self, batch: Batch, **arrays: torch.Tensor) -> None:
        """Keep the rows that are there; each array [R, ...]."""
        present = batch["row_weights"].cpu() > 0
        self._positions.append(batch.start + np.flatnonzero(present.numpy()))
        for name, values in arrays.items():
            wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
            self._arrays.setdefault(name, []).append(wide.cpu()[present].numpy())

    def gather(self, group: Group) -> dict[str, np.ndarray]:
        """All rows of all ranks by name, [n, ...], on every rank. Collective."""
        mine = (
            np.concatenate(self._positions),
            {name: np.concatenate(values) for name, values in self._arrays.items()},
        )
        parts = group.gather_objects(mine)
        order = np.argsort(np.concatenate([positions for positions, _ in parts]), kind="stable")
        return {name: np.concatenate([arrays[name] for _, arrays in parts])[order] for name in parts[0][1]}


def task_class(config: FinetuneConfig) -> type[TaskParts[Any]]:
    """The class of `downstream.kind`; its module is imported now, since each has libraries of its own."""
    kind: type[TaskParts[Any]] = find("task", config.downstream.kind, "downstream.kind").load()
    return kind


def build_task(config: FinetuneConfig, environment: Environment, *, figures: bool = True) -> DownstreamTask:
    """Open the data of `downstream.kind`, and complete the settings that follow from them, in place.

    Args:
        figures: of the measured rows are wanted; False: predictions will do.

    Raises:
        DataError: the data is missing, damaged or of another format.
        RefusedError: settings that do not fit the data or each other, or measured rows without labels.
    """
    task: DownstreamTask = find("task", config.downstream.kind, "downstream.kind").load()(config, environment)
    if figures and task.unlabelled:
        task.sources.close()
        raise RefusedError(task.unlabelled)
    return task


def seed_result(task: DownstreamTask, seed: int, metrics: dict[str, Any], **fields: Any) -> SeedResult:
    """Return the result of one run of a task.

    Args:
        metrics: of `Measured.metrics`, with their `detail`.
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
