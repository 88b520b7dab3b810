"""Evaluation: metrics or prediction files from the outputs of all ranks, and opening finished runs to evaluate them."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trp_scale.checkpoint.document import CheckpointDocument, read_document, read_hooks_state
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
from trp_scale.finetuning.encoders import load_weights
from trp_scale.models.batch_norm import RunningStatistics, batch_norms, load_statistics
from trp_scale.storage.files import atomic_write


def require_scikit_learn() -> None:
    """Raise RefusedError if scikit-learn, which needs scipy, is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise RefusedError("scikit-learn is not installed; run: pip install 'trp-scale[evaluation]'")


class Collector(Protocol):
    """Collects predictions for the measured rows, one micro-batch at a time; all ranks have equally many.

    Padding rows are skipped, so the result does not depend on the number of ranks.
    """

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the outputs of `DownstreamTask.predict` for a micro-batch. Collective."""
        ...


class Metrics(Collector, Protocol):
    """Collects statistics of one rank's rows and combines them over ranks."""

    def finish(self, group: Group) -> dict[str, Any]:
        """Return metric values by name, the same on all ranks; "detail" has values that tables omit, such as values per
        class. Collective."""
        ...


class Predictions(Collector, Protocol):
    """Writes the predictions of all ranks into files, on rank 0."""

    def finish(self) -> list[Path]:
        """Write the remaining predictions; returns the files, or their directory if there are many. Collective."""
        ...


def predict(
    engine: Engine, compute: Callable[..., Any], windows: Iterable[Batch], collectors: Sequence[Collector]
) -> None:
    """Pass the outputs of `compute` (`DownstreamTask.predict`) for all rows to the collectors. Collective."""
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
    refuse_unreadable_rows(corrupt, engine.data_group)


def read_once(
    rows: Rows, plan: HeldOutPlan, config: Config, group: Group, *, pin_memory: bool = False
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of the planned rows: each row once, in stored order, then padding rows with
    row_weights 0."""
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


def all_blocks(blocks: Sequence[Blocks]) -> list[Chosen]:
    """Return masks [n] that choose all blocks of each data set."""
    return [np.ones(len(table.rows), dtype=np.bool_) for table in blocks]


def refuse_unreadable_rows(corrupt: Iterable[str], group: Group) -> None:
    """Raise `UnreadableError` if any rank has unreadable rows `corrupt`: metrics are of all rows. Collective."""
    if unread := sorted(set().union(*group.gather_objects(set(corrupt)))):
        raise UnreadableError(
            f"{len(unread)} of the measured samples cannot be read ({', '.join(unread[:3])}), but metrics need all "
            "samples; copy or shard the data again"
        )


def unique_names(classes: Sequence[str]) -> list[str]:
    """Return unique names of the classes, with the class number for repeated names (ImageNet has two cranes)."""
    counts = Counter(classes)
    return [name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(classes)]


def label_ranks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the rank [R] of each label [R] among the descending logits [R, C], from 0.

    Ties go to the lower class. The rank is C if a logit is not finite.
    """
    logit = logits.gather(1, labels[:, None])  # [R, 1]
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]  # [R, C]
    before = (logits > logit) | ((logits == logit) & lower)
    return before.sum(1).masked_fill(~logits.isfinite().all(1), logits.shape[1])


class GatheredRows:
    """Per-row outputs of all ranks in stored order, for metrics over whole sets of predictions."""

    def __init__(self) -> None:
        self._positions: list[np.ndarray] = []
        self._arrays: dict[str, list[np.ndarray]] = {}

    def add(self, batch: Batch, **arrays: torch.Tensor) -> None:
        """Store the rows of a micro-batch, without padding rows; each array is [R, ...]."""
        present = batch["row_weights"].cpu() > 0
        self._positions.append(batch.start + np.flatnonzero(present.numpy()))
        for name, values in arrays.items():
            wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
            self._arrays.setdefault(name, []).append(wide.cpu()[present].numpy())

    def gather(self, group: Group) -> dict[str, np.ndarray]:
        """Return the arrays [n, ...] of all ranks' rows by name, on every rank. Collective."""
        mine = (
            np.concatenate(self._positions),
            {name: np.concatenate(values) for name, values in self._arrays.items()},
        )
        parts = group.gather_objects(mine)
        order = np.argsort(np.concatenate([positions for positions, _ in parts]), kind="stable")
        return {name: np.concatenate([arrays[name] for _, arrays in parts])[order] for name in parts[0][1]}


def write_table(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]], *, separator: str) -> None:
    """Write a table with a header atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        file = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
        file.detach()


def image_names(plan: Plan, datasets: Sequence[ImageDataset]) -> list[str]:
    """Return a key for each measured image, in stored order.

    For a sharded folder the key is the image's path without suffix. Keys of a mixture are MEMBER/KEY. If several tars
    of a data set repeat keys, its keys are TAR/KEY.

    Raises:
        DataError: an index is missing, or a key is not a relative path within a folder.
    """
    addresses = plan.locate(np.arange(plan.rows))
    keys = [image_keys(dataset) for dataset in datasets]
    names = []
    for member, block, row in zip(addresses.member, addresses.block, addresses.row, strict=True):
        names.append(keys[member][int(datasets[member].blocks.first[block]) + int(row)])
    return names


def image_keys(dataset: ImageDataset) -> list[str]:
    """Return the keys of a data set's images in stored order; see `image_names`."""
    keys = dataset.samples.keys()
    wrong = next((key for key in keys if not is_within(key)), None)
    if wrong is not None:
        raise DataError(f"{dataset.directory}: image key {quote(wrong)} is not the path of a file within a folder")
    if max(Counter(keys).values()) > 1:
        counts = np.diff(dataset.samples.starts).tolist()
        tars = [path.stem for path, count in zip(dataset.samples.shards, counts, strict=True) for _ in range(count)]
        keys = [f"{tar}/{key}" for tar, key in zip(tars, keys, strict=True)]
    return [f"{dataset.name}/{key}" for key in keys] if dataset.name else keys


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """Newest checkpoint and settings of a run.

    Attributes:
        directory: of the run; for `trp-scale finetune` of one task and seed.
        document: of the checkpoint.
        weights: last or average.
    """

    directory: Path
    checkpoint: Path
    document: CheckpointDocument
    config: Any
    weights: Weights = "last"

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the fine-tuned model's classes; `None` if it has none."""
        names = self.document.extra.get("classes")
        return None if names is None else tuple(names)


def open_run(source: Path, weights: Weights = "last") -> ReadRun:
    """Open a checkpoint, or the newest checkpoint of a run directory."""
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
        RefusedError: no checkpoint exists, or it is not of a finished fine-tuning run.
    """
    run = open_run(directory, weights)
    config, document = run.config, run.document
    if not isinstance(config, FinetuneConfig):
        raise RefusedError(
            f"--run {directory}: a pre-training run, which has no downstream task; allowed: a directory of "
            "trp-scale finetune"
        )
    if document.step < config.training.steps:
        raise RefusedError(
            f"--run {directory}: stopped after {document.step} of {config.training.steps} steps; repeat its command "
            "to finish it"
        )
    return run


def find_runs(run: Path, weights: Weights = "last") -> dict[str, list[ReadRun]]:
    """Open all tasks and seeds of a `trp-scale finetune` directory, or a single run; returns the runs by task."""
    if (run / "checkpoints").is_dir():
        directories = [run]
    else:
        begun = (path for path in run.glob("*/seed_*") if any(path.iterdir()))  # a refused run leaves it empty
        directories = sorted(begun, key=lambda path: (path.parent.name, len(path.name), path.name))
    if not directories:
        raise RefusedError(
            f"--run {run}: no checkpoints found; allowed: a run directory of trp-scale pretrain, a directory of "
            "trp-scale finetune with TASK/seed_N/checkpoints, or one of its seeds"
        )
    by_task: dict[str, list[ReadRun]] = {}
    for directory in directories:
        finetuned = read_run(directory, weights)
        by_task.setdefault(finetuned.config.downstream.task or finetuned.config.downstream.kind, []).append(finetuned)
    return by_task


class PredictingEngine(PlainEngine):
    """Keeps frozen, unsharded weights on every rank."""

    def place(self, module: nn.Module) -> nn.Module:
        return module.requires_grad_(False).to(self.device)


def predicting_engine(module: nn.Module, run: ReadRun, environment: Environment) -> PredictingEngine:
    """Return an engine for `module` with the weights of the run's checkpoint.

    Raises:
        RefusedError: the checkpoint has other tensors, or lacks the averaged weights that run.weights selects.
    """
    weights = read_full_state(run.checkpoint, STATE_OF[run.weights])
    load_weights(module, weights, str(run.checkpoint), "; does the measured data have other classes?")
    if norms := batch_norms(module):
        load_statistics(norms, read_hooks_state(run.checkpoint, run.document)[RunningStatistics.name])
    config = run.config
    config.training.compile = "none"
    if config.training.precision == "fp16":
        config.training.precision = "fp32"  # fp16 needs DeepSpeed's loss scaler
    return PredictingEngine(module, config, device=environment.device, data_group=environment.data)
