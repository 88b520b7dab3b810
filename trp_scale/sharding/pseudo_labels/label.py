"""Pseudo-labels: depth and segmentation maps predicted by models.

Each model makes one label shard per image shard. Threads decode and preprocess the next images while the models run.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trp_scale.data.images.dataset import decode_image, jpeg_size
from trp_scale.data.images.formats import Map, write_png
from trp_scale.data.images.maps import OWN_TAR
from trp_scale.data.index import index_path, read_index, read_index_document
from trp_scale.data.raw_files import read_dataset
from trp_scale.data.samples import SampleTable, read_samples
from trp_scale.data.tar_reader import SampleReader
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.base import Size
from trp_scale.pretraining.modalities.settings import LabelSettings
from trp_scale.sharding.clusters import cluster_gpus, cpus_of_task
from trp_scale.sharding.job import ShardingJob
from trp_scale.sharding.parts import ShardWriter, new_tar, report_path
from trp_scale.sharding.pseudo_labels.directory import (
    UNREADABLE,
    LabelReport,
    PseudoLabelConfig,
    digest_of_images,
    finished_labels,
    label_kind,
    label_kinds,
    refuse_present,
)
from trp_scale.sharding.pseudo_labels.models import (
    FoundModel,
    InFlight,
    Labeller,
    Precision,
    find_model,
    load_model,
    load_processor,
)
from trp_scale.sharding.workers import Advance, Portion, ProgressBar, process_number, run_portions

__all__ = ["PseudoLabelConfig", "pseudo_label"]

MAX_THREADS = 16
"""Maximum threads per process for reading and encoding."""

log = logging.getLogger(__name__)


def pseudo_label(config: PseudoLabelConfig) -> bool:
    """Label a data set, or one part of it. Return whether dataset.json now lists all requested modalities.

    Raises:
        DataError: a setting, a model or the data set cannot be used, the directory has other labels, or too many images
            could not be labelled.
    """
    config.check()
    advice = "give --data a data set made by trp-scale shard-images"
    fields = read_dataset(config.data, "image", advice, f"--data {config.data}")
    fields.texts("suffixes")
    fields.whole("rows")
    document = dict(fields.document)
    devices = _devices(config)
    precision = _precision(config, devices)
    tasks, jobs, descriptions = [], [], []
    for modality, name in config.models().items():
        model, settings = find_model(modality, name), config.labelling()[modality]
        identity, description = label_kinds()[modality].describe(model.flag, model.details, settings)
        kind, output = label_kind(config.data, document, modality), config.data / config.directory(modality)
        identity = {"model": model.fingerprint, "precision": precision, **identity}
        tasks.append(LabelTask(model=model, output=output, settings=settings))
        jobs.append(ShardingJob(config, output, kind, identity))
        if not kind.is_stored(output, identity):
            refuse_present(config.data, document, modality, f"{kind.flag} {output.name}", replace=config.replace)
        descriptions.append({"model": model.name, "replace": config.replace, **description})
    portions = [Portion(number, (shard,), 0) for number, shard in enumerate(document["shards"])]
    with ExitStack() as stack:
        for job in jobs:
            stack.enter_context(job.only_run())
            job.begin("", portions)
        selected = jobs[0].select_portions(portions)
        missing = {portion: sum(not task.is_finished(portion.items[0]) for task in tasks) for portion in selected}
        labels = sum(
            len(read_index_document(config.data / OWN_TAR / portion.items[0]).blocks) * count
            for portion, count in missing.items()
        )
        unfinished = [portion for portion, count in missing.items() if count]
        if len(unfinished) < len(selected):
            log.info("%d of %d shards are labelled already", len(selected) - len(unfinished), len(selected))
        _run(config, document, tuple(tasks), unfinished, labels, devices, precision)
        finished = [job.finish(description) for job, description in zip(jobs, descriptions, strict=True)]
    return None not in finished


def _devices(config: PseudoLabelConfig) -> tuple[str, ...]:
    """Return the devices of the processes; they are used in turn."""
    on_ray = config.executor == "ray"
    count = 0 if config.device == "cpu" else cluster_gpus() if on_ray else torch.cuda.device_count()
    if config.device == "cuda" and not count:
        raise DataError("--device cuda: no GPU is visible; give --device cpu, or check CUDA_VISIBLE_DEVICES")
    # Under Ray each process sees only its own GPU, as cuda:0.
    return tuple(f"cuda:{number}" for number in range(min(count, 1) if on_ray else count)) or ("cpu",)


def _precision(config: PseudoLabelConfig, devices: tuple[str, ...]) -> Precision:
    if config.precision != "auto":
        return config.precision
    if devices[0] != "cpu" and not torch.cuda.is_available():
        raise DataError(
            "--precision auto: this machine has no GPU, so bf16 support of the cluster is unknown; give bf16 or fp32"
        )
    return "bf16" if devices[0] != "cpu" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def _run(
    config: PseudoLabelConfig,
    document: dict[str, Any],
    tasks: tuple[LabelTask, ...],
    portions: list[Portion[str]],
    labels: int,
    devices: tuple[str, ...],
    precision: Precision,
) -> None:
    gpus = int(devices[0] != "cpu")
    if config.executor == "ray":
        processes, cores, alone = config.processes, cpus_of_task(gpus), False
    else:
        processes = config.processes or len(devices)
        cores, alone = max(1, len(os.sched_getaffinity(0)) // processes), not gpus and processes == 1
    threads = max(2, min(MAX_THREADS, cores))
    model_threads = 0 if alone else 1 if gpus else cores  # with a GPU, the pool uses the cores
    run_portions(
        portions,
        LabelWorker,
        (tasks, tuple(document["suffixes"]), config.batch, devices, precision, threads, model_threads),
        processes=processes,
        executor=config.executor,
        gpus=gpus,
        bar=ProgressBar(counters=("labels",), total=labels, shown=config.progress, title="labelling"),
    )


@dataclass(kw_only=True)
class Prepared:
    """Model inputs of an image.

    Attributes:
        size: (H, W) of the image.
        inputs: float [3, h, w] by modality.
        flaws: reason for a missing input, by modality.
    """

    size: Size
    inputs: dict[str, Tensor] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)


class ImagePreparer:
    """Reader and preprocessor of the images of one shard. Thread-safe.

    Args:
        table: samples of the shard; the first column is the image.
        labellers: models by modality.
    """

    def __init__(self, table: SampleTable, labellers: Mapping[str, Labeller]) -> None:
        self._table = table
        self._labellers = labellers
        self._local = threading.local()  # one reader per thread: readers keep files open

    def __call__(self, image: int) -> Prepared:
        """Prepare an image by its index in the shard.

        Raises:
            DataError: the shard cannot be read. A damaged image gets flaws instead.
        """
        if not hasattr(self._local, "reader"):
            self._local.reader = SampleReader(self._table, verify=False)
        content = bytearray()
        try:
            (content,) = self._local.reader.members(image)
            if zlib.crc32(content) != int(self._table.checksums[image, 0]):  # else a wrong label would be stored
                raise DataError("checksum differs from the index")
            pixels = decode_image(content)
        except DataError as error:
            if isinstance(error.__cause__, OSError):  # storage error, not a damaged image
                raise
            return Prepared(size=jpeg_size(content), flaws=dict.fromkeys(self._labellers, str(error)))
        prepared = Prepared(size=(pixels.shape[1], pixels.shape[2]))
        for modality, labeller in self._labellers.items():
            values = labeller.prepare(pixels)
            if isinstance(values, str):
                prepared.flaws[modality] = values
            else:
                prepared.inputs[modality] = values
        return prepared


def iterate_windows(
    pool: ThreadPoolExecutor, preparer: ImagePreparer, images: int, window: int
) -> Iterator[tuple[range, list[Prepared]]]:
    """Yield windows of prepared images in order, while the pool prepares the next window."""
    waiting = deque(range(start, min(start + window, images)) for start in range(0, images, window))
    pending: deque[tuple[range, list[Future[Prepared]]]] = deque()
    while waiting or pending:
        while waiting and len(pending) < 2:
            places = waiting.popleft()
            pending.append((places, [pool.submit(preparer, position) for position in places]))
        places, futures = pending.popleft()
        yield places, [future.result() for future in futures]


def batch_by_shape(inputs: Sequence[Tensor | None], batch: int) -> list[list[int]]:
    """Return indices of inputs in batches of equal shape, ordered by the first appearance of the shape."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for position, values in enumerate(inputs):
        if values is not None:
            by_shape.setdefault(tuple(values.shape), []).append(position)
    return [same[start : start + batch] for same in by_shape.values() for start in range(0, len(same), batch)]


WINDOW = 4
"""Batches per window. Images are grouped by shape within a window."""


@dataclass(frozen=True, kw_only=True)
class LabelTask:
    """Model, output directory and settings of one modality."""

    model: FoundModel
    output: Path
    settings: LabelSettings

    def is_finished(self, shard: str) -> bool:
        """Whether a shard is labelled."""
        return finished_labels(self.output.parent, self.model.modality, self.output, shard) is not None


class LabelWorker:
    """Worker that makes the missing labels of a shard.

    Args:
        tasks: one for each modality.
        suffixes: members of an image sample.
        batch: batch size of the models.
        devices: used by the processes in turn.
        precision: of the models.
        threads: of this process, for reading, preprocessing and encoding.
        model_threads: torch threads of this process; 0 = unchanged.
        advance: called with the number of new labels.
    """

    def __init__(
        self,
        tasks: tuple[LabelTask, ...],
        suffixes: tuple[str, ...],
        batch: int,
        devices: tuple[str, ...],
        precision: Precision,
        threads: int,
        model_threads: int,
        advance: Advance,
    ) -> None:
        self._tasks, self._suffixes, self._batch = tasks, suffixes, batch
        self._device = torch.device(devices[process_number() % len(devices)])
        self._precision, self._threads = precision, threads
        self._advance = advance
        self._labellers: dict[str, Labeller] = {}
        if self._device.type == "cuda":  # else pinned memory would create a context on the first GPU
            torch.cuda.set_device(self._device)
        if model_threads:
            torch.set_num_threads(model_threads)

    def __call__(self, portion: Portion[str]) -> None:
        (shard,) = portion.items
        with ExitStack() as stack:
            shards: dict[str, ShardWriter] = {}
            for task in self._tasks:
                if not task.is_finished(shard):
                    tar = task.output / shard
                    index_path(tar).unlink(missing_ok=True)  # stale, or of a truncated tar
                    shards[task.model.modality] = stack.enter_context(new_tar(tar, report_path(task.output, tar.stem)))
            if shards:
                self._label(shard, shards)

    def _labeller(self, task: LabelTask) -> Labeller:
        """Return the model of a task, loaded on first use so that its errors belong to a shard."""
        model = task.model
        if model.modality not in self._labellers:
            processor = load_processor(model.flag, model.directory)
            labels = label_kinds()[model.modality]
            self._labellers[model.modality] = Labeller(
                model,
                load_model(model, self._device),
                processor,
                labels.interpret(processor, model.details, task.settings),
                device=self._device,
                precision=self._precision,
            )
        return self._labellers[model.modality]

    def _label(self, shard: str, shards: Mapping[str, ShardWriter]) -> None:
        dataset = self._tasks[0].output.parent
        path = dataset / OWN_TAR / shard
        table, _ = read_samples(
            path.parent, [shard], self._suffixes, rows_per_block=1, opened=("jpg",), use_index=False
        )
        keys = [block.key for block in read_index(path).blocks]
        digest = digest_of_images(dataset, shard)
        labellers = {task.model.modality: self._labeller(task) for task in self._tasks if task.model.modality in shards}
        with ThreadPoolExecutor(self._threads) as pool:
            streams = [
                LabelStream(
                    labeller,
                    shards[modality],
                    keys=keys,
                    name=path.stem,
                    digest=digest,
                    pool=pool,
                    batch=self._batch,
                )
                for modality, labeller in labellers.items()
            ]
            ahead = iterate_windows(pool, ImagePreparer(table, labellers), table.rows, WINDOW * self._batch)
            pending: deque[list[WindowOfLabels]] = deque()
            for places, prepared in ahead:
                pending.append([stream.start(places, prepared) for stream in streams])
                if len(pending) > 1:  # the device runs the next window while this one is encoded
                    self._finish(streams, pending.popleft())
            while pending:
                self._finish(streams, pending.popleft())
        for stream in streams:
            stream.close()

    def _finish(self, streams: list[LabelStream], windows: list[WindowOfLabels]) -> None:
        for stream, window in zip(streams, windows, strict=True):
            stream.finish(window)
            self._advance(len(window.places))


@dataclass(frozen=True, kw_only=True)
class WindowOfLabels:
    """Consecutive images with pending maps.

    Attributes:
        places: indices of the images in the shard.
        prepared: sizes and flaws, without inputs.
        batches: (indices in the window, pending maps).
    """

    places: range
    prepared: list[Prepared]
    batches: list[tuple[list[int], InFlight]]


class LabelStream:
    """Writer of the labels of one model for one shard.

    Args:
        shard: new shard.
        keys: of the images.
        name: of the image shard, for the list of empty labels.
        digest: of the image index.
        pool: threads for encoding.
        batch: batch size.
    """

    def __init__(
        self,
        labeller: Labeller,
        shard: ShardWriter,
        *,
        keys: Sequence[str],
        name: str,
        digest: str,
        pool: ThreadPoolExecutor,
        batch: int,
    ) -> None:
        self._labeller = labeller
        self._shard = shard
        self._keys = keys
        self._name = name
        self._pool = pool
        self._batch = batch
        self._modality = labeller.modality
        self._report = LabelReport(digest=digest)

    def start(self, places: range, prepared: Sequence[Prepared]) -> WindowOfLabels:
        """Queue the images of a window on the device, without waiting."""
        inputs = [image.inputs.get(self._modality) for image in prepared]
        batches = []
        for batch in batch_by_shape(inputs, self._batch):
            values = [values for position in batch if (values := inputs[position]) is not None]
            batches.append((batch, self._labeller.start(values, [prepared[position].size for position in batch])))
        kept = [Prepared(size=image.size, flaws=image.flaws) for image in prepared]
        return WindowOfLabels(places=places, prepared=kept, batches=batches)

    def finish(self, window: WindowOfLabels) -> None:
        """Wait for the maps of a window, then write them."""
        maps_of_row: dict[int, tuple[Map, int]] = {}
        for batch, flight in window.batches:
            maps_of_row.update(zip(batch, flight.wait(self._labeller.dtype), strict=True))
        form = self._labeller.format
        maps = []
        for number, (position, image) in enumerate(zip(window.places, window.prepared, strict=True)):
            flaw = image.flaws.get(self._modality, "")
            numbers, clipped = maps_of_row.get(number) or (
                np.full(image.size, form.empty, dtype=self._labeller.dtype),
                0,
            )
            missing = int((numbers == form.empty).sum())
            if not flaw and missing == numbers.size:
                flaw = "the model's output has no value that can be stored"
            self._count(position, flaw, missing, clipped)
            maps.append(numbers)
        level = label_kinds()[self._modality].png_level
        contents = self._pool.map(lambda numbers: write_png(numbers, level), maps)
        for position, content in zip(window.places, contents, strict=True):
            self._shard.add(self._keys[position], 1, {form.suffix: content})

    def _count(self, position: int, flaw: str, missing: int, clipped: int) -> None:
        report = self._report
        if flaw:
            report.skip(UNREADABLE, f"{self._name}/{self._keys[position]}", flaw)
        else:
            report.images += 1
            report.missing += missing
            report.clipped += clipped

    def close(self) -> None:
        """Store the report in the shard."""
        self._shard.report = dict(vars(self._report))
