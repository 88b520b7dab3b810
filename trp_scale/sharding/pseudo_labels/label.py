"""Pseudo-labels: depth and segmentation maps predicted by models, one model after another.

Each model makes one label shard per image shard. Threads decode and preprocess the next images while the models run.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trp_scale.data.images.dataset import decode_image, jpeg_size
from trp_scale.data.images.formats import Map, write_png
from trp_scale.data.images.maps import IMAGE, OWN_TAR
from trp_scale.data.index import index_path, read_index, read_index_document
from trp_scale.data.raw_files import read_dataset
from trp_scale.data.samples import read_samples
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
    label_kind,
    label_kinds,
)
from trp_scale.sharding.pseudo_labels.models import (
    FoundModel,
    InFlight,
    Labeller,
    Precision,
    find_model,
)
from trp_scale.sharding.workers import Advance, Portion, process_number

__all__ = ["PseudoLabelConfig", "pseudo_label"]

MAX_THREADS = 16
"""Maximum threads per process for reading and encoding."""


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
    processes, *threads = _processes(config, devices)
    config = replace(config, processes=processes)
    labellings: list[tuple[ShardingJob[LabelReport], tuple[Any, ...], dict[str, object]]] = []
    for modality, name in config.models().items():
        model, settings = find_model(modality, name), config.labelling()[modality]
        identity, description = label_kinds()[modality].describe(model.flag, model.details, settings)
        kind, output = label_kind(config.data, document, modality), config.data / config.directory(modality)
        identity = {"model": model.fingerprint, "precision": precision, **identity}
        job = ShardingJob(config, output, kind, identity)
        if not kind.is_stored(output, identity):
            kind.refuse_present(document, f"{kind.flag} {output.name}", replace=config.replace)
        work = (model, output, settings, tuple(document["suffixes"]), config.batch, devices, precision, *threads)
        labellings.append((job, work, {"model": model.name, "replace": config.replace, **description}))
    shards = config.own_part().select(document["shards"])
    counts = {shard: len(read_index_document(config.data / OWN_TAR / shard).blocks) for shard in shards}
    portions = [Portion(number, (shard,), counts.get(shard, 0)) for number, shard in enumerate(document["shards"])]
    with ExitStack() as stack:
        for job, _, _ in labellings:
            stack.enter_context(job.only_run())
            job.begin("", portions)
        for job, work, _ in labellings:
            job.run(portions, LabelWorker, work, ("labels",), "labelling", gpus=int(devices[0] != "cpu"))
        finished = [job.finish(description) for job, _, description in labellings]
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


def _processes(config: PseudoLabelConfig, devices: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the processes, the threads of each, and the torch threads of each; 0 torch threads = unchanged."""
    gpus = int(devices[0] != "cpu")
    if config.executor == "ray":
        processes, cores, alone = config.processes, cpus_of_task(gpus), False
    else:
        processes = config.processes or len(devices)
        cores, alone = max(1, len(os.sched_getaffinity(0)) // processes), not gpus and processes == 1
    model_threads = 0 if alone else 1 if gpus else cores  # with a GPU, the pool uses the cores
    return processes, max(2, min(MAX_THREADS, cores)), model_threads


@dataclass(kw_only=True)
class Prepared:
    """Model input of an image.

    Attributes:
        size: (H, W) of the image.
        inputs: float [3, h, w]; `None` if it is missing, or after the model has it.
        flaw: reason for a missing input.
    """

    size: Size
    inputs: Tensor | None = None
    flaw: str = ""


def batch_by_shape(inputs: Sequence[Tensor | None], batch: int) -> list[list[int]]:
    """Return indices of inputs in batches of equal shape, ordered by the first appearance of the shape."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for position, values in enumerate(inputs):
        if values is not None:
            by_shape.setdefault(tuple(values.shape), []).append(position)
    return [same[start : start + batch] for same in by_shape.values() for start in range(0, len(same), batch)]


WINDOW = 4
"""Batches per window. Images are grouped by shape within a window."""


class LabelWorker:
    """Worker that makes the labels of a shard.

    Args:
        model: model of the modality.
        output: directory of the labels.
        settings: label settings of the modality.
        suffixes: members of an image sample.
        batch: batch size of the model.
        devices: used by the processes in turn.
        precision: of the model.
        threads: of this process, for reading, preprocessing and encoding.
        model_threads: torch threads of this process; 0 = unchanged.
        advance: called with the number of new labels.
    """

    def __init__(
        self,
        model: FoundModel,
        output: Path,
        settings: LabelSettings,
        suffixes: tuple[str, ...],
        batch: int,
        devices: tuple[str, ...],
        precision: Precision,
        threads: int,
        model_threads: int,
        advance: Advance,
    ) -> None:
        self._model, self._output, self._settings = model, output, settings
        self._suffixes, self._batch = suffixes, batch
        self._device = torch.device(devices[process_number() % len(devices)])
        self._precision, self._threads = precision, threads
        self._advance = advance
        if self._device.type == "cuda":  # else pinned memory would create a context on the first GPU
            torch.cuda.set_device(self._device)
        if model_threads:
            torch.set_num_threads(model_threads)

    @cached_property
    def _labeller(self) -> Labeller:
        """Model, loaded on first use so that its errors belong to a shard."""
        return Labeller(self._model, self._settings, device=self._device, precision=self._precision)

    def __call__(self, portion: Portion[str]) -> None:
        (shard,) = portion.items
        tar, images = self._output / shard, self._output.parent / OWN_TAR / shard
        index_path(tar).unlink(missing_ok=True)  # stale, or of a truncated tar
        with new_tar(tar, report_path(self._output, tar.stem)) as writer, ThreadPoolExecutor(self._threads) as pool:
            stream = LabelStream(self._labeller, writer, images, self._suffixes, pool, self._batch)
            stream.run(self._advance)
            writer.report = dict(vars(stream.report))


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
    """Reader of the images of one shard and writer of their labels.

    Args:
        labeller: the model.
        shard: new shard of labels.
        images: tar of the images.
        suffixes: members of an image sample.
        pool: threads for reading, preprocessing and encoding.
        batch: batch size.

    Attributes:
        report: counts of the written labels.
    """

    def __init__(
        self,
        labeller: Labeller,
        shard: ShardWriter,
        images: Path,
        suffixes: tuple[str, ...],
        pool: ThreadPoolExecutor,
        batch: int,
    ) -> None:
        self._labeller, self._shard, self._pool, self._batch = labeller, shard, pool, batch
        self._table, _ = read_samples(images.parent, [images.name], suffixes, 1, opened=(IMAGE,), use_index=False)
        self._name, self._keys = images.stem, [block.key for block in read_index(images).blocks]
        self._local = threading.local()  # one reader per thread: readers keep files open
        self.report = LabelReport(digest=digest_of_images(images))

    def run(self, advance: Advance) -> None:
        """Label all images. The device runs a window while the next one is prepared and the last one is encoded."""
        count, window = self._table.rows, WINDOW * self._batch
        preparing: deque[tuple[range, list[Future[Prepared]]]] = deque()
        running: deque[WindowOfLabels] = deque()
        waiting = deque(range(first, min(first + window, count)) for first in range(0, count, window))
        while waiting or preparing or running:
            while waiting and len(preparing) < 2:
                places = waiting.popleft()
                preparing.append((places, [self._pool.submit(self._prepare, position) for position in places]))
            if preparing:
                places, futures = preparing.popleft()
                running.append(self.start(places, [future.result() for future in futures]))
            if len(running) > 1 or not preparing:
                advance(self.finish(running.popleft()))

    def _prepare(self, image: int) -> Prepared:
        """Read and preprocess an image by its index in the shard. Thread-safe.

        Raises:
            DataError: the shard cannot be read. A damaged image gets a flaw instead.
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
            return Prepared(size=jpeg_size(content), flaw=str(error))
        size, values = (pixels.shape[1], pixels.shape[2]), self._labeller.prepare(pixels)
        return Prepared(size=size, flaw=values) if isinstance(values, str) else Prepared(size=size, inputs=values)

    def start(self, places: range, prepared: list[Prepared]) -> WindowOfLabels:
        """Queue the images of a window on the device, without waiting."""
        batches = []
        for batch in batch_by_shape([image.inputs for image in prepared], self._batch):
            values = [values for position in batch if (values := prepared[position].inputs) is not None]
            batches.append((batch, self._labeller.start(values, [prepared[position].size for position in batch])))
        for image in prepared:
            image.inputs = None  # free its memory
        return WindowOfLabels(places=places, prepared=prepared, batches=batches)

    def finish(self, window: WindowOfLabels) -> int:
        """Wait for the maps of a window, then write them; return their number."""
        maps_of_row: dict[int, tuple[Map, int]] = {}
        for batch, flight in window.batches:
            maps_of_row.update(zip(batch, flight.wait(self._labeller.dtype), strict=True))
        form, report = self._labeller.format, self.report
        maps = []
        for number, (position, image) in enumerate(zip(window.places, window.prepared, strict=True)):
            numbers, clipped = maps_of_row.get(number) or (
                np.full(image.size, form.empty, dtype=self._labeller.dtype),
                0,
            )
            missing, flaw = int((numbers == form.empty).sum()), image.flaw
            if not flaw and missing == numbers.size:
                flaw = "the model's output has no value that can be stored"
            if flaw:
                report.skip(UNREADABLE, f"{self._name}/{self._keys[position]}", flaw)
            else:
                report.images += 1
                report.missing += missing
                report.clipped += clipped
            maps.append(numbers)
        level = label_kinds()[self._labeller.modality].png_level
        contents = self._pool.map(lambda numbers: write_png(numbers, level), maps)
        for position, content in zip(window.places, contents, strict=True):
            self._shard.add(self._keys[position], 1, {form.suffix: content})
        return len(maps)
