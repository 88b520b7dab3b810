"""Measuring: outputs of all ranks' rows become figures or files; trained runs are read back to be measured again."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trp_scale.checkpoint.document import CheckpointDocument, read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import STATE_OF, read_full_state
from trp_scale.config import Config, RefusedError, Weights
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import from_dict
from trp_scale.config.schema import is_within
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.data.images.dataset import ImageDataset
from trp_scale.data.plan import Blocks, HeldOutPlan, Plan
from trp_scale.data.sources import Chosen, Rows, ValidationSource
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.engines.plain import PlainEngine
from trp_scale.errors import DataError, UnreadableError, quote
from trp_scale.finetuning.encoders import take_weights
from trp_scale.reporting.results import RESULTS_FILE, read_results
from trp_scale.storage.files import atomic_write


class Collector(Protocol):
    """Takes what a task predicts of the measured rows, one micro-batch after another; all ranks have as many. Rows that
    only fill a batch are left out, so that any number of ranks gives the same."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the result of `DownstreamTask.predict` for a micro-batch. Collective."""
        ...


class Metrics(Collector, Protocol):
    """Collects figures of one rank's rows, then joins the ranks."""

    def finish(self, group: Group) -> dict[str, Any]:
        """Figures by name, the same on all ranks; under "detail" what a table has no place for (per class, say).
        Collective."""
        ...


class Predictions(Collector, Protocol):
    """Writes predictions into files: rank 0 writes, whatever rank predicts."""

    def finish(self) -> list[Path]:
        """Write what is not written yet; returns the files, or the directory of many. Collective."""
        ...


def predict(
    engine: Engine, compute: Callable[..., Any], windows: Iterable[Batch], collectors: Sequence[Collector]
) -> None:
    """Hand the outputs of all measured rows to the collectors. Collective.

    Args:
        compute: `DownstreamTask.predict`.

    Raises:
        RefusedError: rows that cannot be read.
    """
    corrupt: set[str] = set()
    engine.train(False)
    with torch.no_grad():
        for batch in windows:
            corrupt |= set(batch.corrupt)
            on_device = batch.to(engine.device)
            outputs = compute(engine, on_device)
            for collector in collectors:
                collector.add(outputs, on_device)
    engine.train(True)
    refuse_unread(corrupt, engine.data_group)


def read_once(
    rows: Rows, plan: HeldOutPlan, config: Config, group: Group, *, pin_memory: bool = False
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of the planned rows, each row once, in stored order; the last ones are filled
    with rows of row_weights 0."""
    source = ValidationSource(
        plan,
        rows.builder,
        config,
        rank=group.rank,
        world=group.size,
        pin_memory=pin_memory,
        stored=rows.stored,
    )
    try:
        yield from source.windows()
    finally:
        source.close()


def every_block(blocks: Sequence[Blocks]) -> list[Chosen]:
    """[n] of each data set, all of its blocks."""
    return [np.ones(len(table.rows), dtype=np.bool_) for table in blocks]


def refuse_unread(corrupt: Iterable[str], group: Group) -> None:
    """Refuse a figure of some rows only. Collective.

    Args:
        corrupt: names of this rank's rows that could not be read.

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


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """Files and settings of a run that is read back.

    Attributes:
        directory: of the run; of `trp-scale finetune` that of its task and seed.
        checkpoint: its newest.
        document: of the checkpoint.
        config: of the run.
        weights: which of its weights are measured.
    """

    directory: Path
    checkpoint: Path
    document: CheckpointDocument
    config: Any
    weights: Weights = "last"

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes that a fine-tuned model tells apart; `None` if it has none."""
        names = self.document.extra.get("classes")
        return None if names is None else tuple(names)


def open_run(source: Path, weights: Weights = "last") -> ReadRun:
    """Open the newest checkpoint of a run directory, or the checkpoint itself.

    Raises:
        RefusedError: there is no checkpoint.
    """
    checkpoint = find_checkpoint(source)
    document = read_document(checkpoint)
    return ReadRun(
        directory=source if checkpoint != source else checkpoint.parent.parent,
        checkpoint=checkpoint,
        document=document,
        config=from_dict(document.config, source=str(checkpoint)),
        weights=weights,
    )


def read_run(directory: Path, weights: Weights = "last") -> ReadRun:
    """Open one task and seed of `trp-scale finetune`.

    Raises:
        RefusedError: there is no checkpoint, it is of no fine-tuning, or of one that has not ended.
    """
    run = open_run(directory, weights)
    config, document = run.config, run.document
    if not isinstance(config, FinetuneConfig):
        raise RefusedError(
            f"--run {directory}: a run of pre-training, which has no downstream task; allowed: a directory of "
            "trp-scale finetune"
        )
    if document.step < config.training.steps:
        raise RefusedError(
            f"--run {directory}: stopped after {document.step} of {config.training.steps} steps; repeat the command "
            "that began it, and it goes on to its end"
        )
    return run


def find_runs(run: Path, weights: Weights = "last") -> dict[str, list[ReadRun]]:
    """The runs of a directory, by task: one alone, or all tasks and seeds of a `trp-scale finetune`.

    Raises:
        RefusedError: there is none, or one of them as `read_run` refuses.
    """
    if (run / "checkpoints").is_dir():
        directories = [run]
    else:
        begun = (path for path in run.glob("*/seed_*") if any(path.iterdir()))  # one that was refused left it empty
        directories = sorted(begun, key=lambda path: (path.parent.name, len(path.name), path.name))
    if not directories:
        raise RefusedError(
            f"--run {run}: no trained run is there; allowed: a run directory of trp-scale pretrain, or a directory of "
            "trp-scale finetune, with TASK/seed_N/checkpoints, or one of those seeds"
        )
    by_task: dict[str, list[ReadRun]] = {}
    for directory in directories:
        finetuned = read_run(directory, weights)
        by_task.setdefault(finetuned.config.downstream.task or finetuned.config.downstream.kind, []).append(finetuned)
    return by_task


def read_origin(run: Path, runs: dict[str, list[ReadRun]]) -> tuple[str, str]:
    """Recipe and pre-trained encoder, for the results."""
    if (run / RESULTS_FILE).is_file():
        results = read_results(run)
        return results.recipe, results.encoder
    first = next(iter(runs.values()))[0]
    return str(run), first.config.model.weights or "scratch"


class PredictingEngine(PlainEngine):
    """Whole weights on each of any number of ranks: nothing is learned, so nothing need be sharded or reduced."""

    def place(self, module: nn.Module) -> nn.Module:
        return module.requires_grad_(False).to(self.device)


def predicting_engine(module: nn.Module, run: ReadRun, environment: Environment) -> PredictingEngine:
    """The model with the weights of the run's checkpoint.

    Args:
        module: of the run, with any weights.

    Raises:
        RefusedError: the checkpoint has other tensors, or no average where run.weights asks for it.
    """
    weights = read_full_state(run.checkpoint, STATE_OF[run.weights])
    take_weights(module, weights, str(run.checkpoint), "; measured on data of other classes")
    config = run.config
    config.training.compile = "none"
    if config.training.precision == "fp16":
        config.training.precision = "fp32"  # needs a loss scaler, which is DeepSpeed's
    return PredictingEngine(module, config, device=environment.device, data_group=environment.data)
