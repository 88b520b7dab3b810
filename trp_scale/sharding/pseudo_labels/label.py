"""Pseudo-labels: depth and segmentation maps of a data set's images, predicted by models.

DATASET/
  dataset.json                  "modalities" names the new directories, once all their shards are there
  shards/image-000000.tar       the images, which stay as they are
  depth/image-000000.tar        one sample for each image, the same keys in the same order: KEY.depth.png
  semseg/image-000000.tar       KEY.semseg.png

Every shard is made on its own, so a stopped run goes on where it was, and parts of a job array share nothing but
dataset.json.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trp_scale.data.images.dataset import FORMAT
from trp_scale.data.images.maps import OWN_TAR
from trp_scale.data.index import read_fields, read_index_document
from trp_scale.data.raw_files import require_dataset
from trp_scale.errors import DataError, quote
from trp_scale.sharding.job.clusters import cluster_gpus, cpus_of_task
from trp_scale.sharding.job.workers import Progressed, run_portions
from trp_scale.sharding.pseudo_labels.directory import LabelDirectory, complete, turn
from trp_scale.sharding.pseudo_labels.models import FoundModel, Precision, find_model
from trp_scale.sharding.pseudo_labels.portion import LabelPortion, LabelTask, LabelWork, LabelWorker
from trp_scale.sharding.pseudo_labels.settings import PseudoLabelConfig, label_kinds

__all__ = ["PseudoLabelConfig", "pseudo_label"]

MOST_THREADS = 16
"""Threads of a process that read and encode."""

log = logging.getLogger(__name__)


def pseudo_label(config: PseudoLabelConfig) -> bool:
    """Label a data set, or this run's part of it; whether dataset.json names all that was asked for now.

    Raises:
        DataError: a setting, a model or the data set cannot be used, the labels' directory holds other ones, or too
            many images could not be labelled.
    """
    config.check()
    require_dataset(config.data, f"--data {config.data}")
    document = _read_dataset(config.data / "dataset.json")
    devices = _devices(config)
    precision = _precision(config, devices)
    tasks = tuple(_task(config, precision, find_model(*named)) for named in config.models().items())
    with turn(config.data) as current:
        for task in tasks:
            task.directory.check(current)
        for task in tasks:
            task.directory.begin(current)
    mine = [LabelPortion(number=number, shard=shard) for number, shard in enumerate(document["shards"])]
    mine = mine[config.shard_index :: config.num_shards]
    missing = {
        portion.number: [task for task in tasks if not task.directory.is_finished(portion.shard)] for portion in mine
    }
    portions = [portion for portion in mine if missing[portion.number]]
    if len(portions) < len(mine):
        log.info("%d of %d shards are labelled already", len(mine) - len(portions), len(mine))
    labels = sum(_images(config.data, portion.shard) * len(missing[portion.number]) for portion in portions)
    _run(config, document, tasks, portions, labels, devices, precision)
    completed = [complete(task.directory, document, alone=config.num_shards == 1) for task in tasks]
    return all(completed)


def _read_dataset(path: Path) -> dict[str, Any]:
    fields = read_fields(path, "give --data a data set that trp-scale shard-images made")
    for field, expected in (("format", FORMAT), ("kind", "image")):
        if (stored := fields.document.get(field)) != expected:
            raise fields.refusal(f"{field} {quote(stored)} found, {expected!r} expected")
    fields.file_names("shards")
    fields.texts("suffixes")
    fields.whole("rows")
    return dict(fields.document)


def _images(dataset: Path, shard: str) -> int:
    return len(read_index_document(dataset / OWN_TAR / shard).blocks)


def _devices(config: PseudoLabelConfig) -> tuple[str, ...]:
    """The device of each process, in turn."""
    on_ray = config.executor == "ray"
    count = 0 if config.device == "cpu" else cluster_gpus() if on_ray else torch.cuda.device_count()
    if config.device == "cuda" and not count:
        raise DataError("--device cuda: no GPU is there; give --device cpu, or see what CUDA_VISIBLE_DEVICES hides")
    # Ray shows a process its own GPU alone, as number 0.
    return tuple(f"cuda:{number}" for number in range(min(count, 1) if on_ray else count)) or ("cpu",)


def _precision(config: PseudoLabelConfig, devices: tuple[str, ...]) -> Precision:
    if config.precision != "auto":
        return config.precision
    if devices[0] != "cpu" and not torch.cuda.is_available():
        raise DataError(
            "--precision auto: this machine has no GPU that tells what those of the cluster can; give bf16 or fp32"
        )
    return "bf16" if devices[0] != "cpu" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def _task(config: PseudoLabelConfig, precision: Precision, model: FoundModel) -> LabelTask:
    labels = label_kinds()[model.modality]
    settings = config.labelling()[model.modality]
    identity, description = labels.describe(model.flag, model.details, settings)
    directory = LabelDirectory(
        dataset=config.data,
        name=config.directory(model.modality),
        modality=model.modality,
        identity={"model": model.fingerprint, "precision": precision, **identity},
        description={"model": model.name, **description},
        flag=f"--{model.modality}.directory",
        max_skipped=config.max_skipped,
        replace=config.replace,
    )
    return LabelTask(model=model, directory=directory, settings=settings)


def _run(
    config: PseudoLabelConfig,
    document: dict[str, Any],
    tasks: tuple[LabelTask, ...],
    portions: list[LabelPortion],
    labels: int,
    devices: tuple[str, ...],
    precision: Precision,
) -> None:
    def text(values: Sequence[int], seconds: float) -> str:
        return f"{values[0]:,} labels  {values[0] / seconds:,.1f} labels/s"

    gpus = int(devices[0] != "cpu")
    if config.executor == "ray":
        processes, cores, alone = config.processes, cpus_of_task(gpus), False
    else:
        processes = config.processes or len(devices)
        cores, alone = max(1, len(os.sched_getaffinity(0)) // processes), not gpus and processes == 1
    work = LabelWork(
        tasks=tasks,
        suffixes=tuple(document["suffixes"]),
        batch=config.batch,
        devices=devices,
        precision=precision,
        threads=max(2, min(MOST_THREADS, cores)),
        model_threads=0 if alone else 1 if gpus else cores,  # beside a GPU the pool has the cores
    )
    run_portions(
        portions,
        LabelWorker,
        (work,),
        processes=processes,
        executor=config.executor,
        gpus=gpus,
        progressed=Progressed(counters=1, total=labels, text=text, shown=config.progress, title="labelling"),
    )
