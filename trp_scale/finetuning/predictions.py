"""Predictions that are saved: what a task writes of them, the names of the images that they are of, and tables."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trp_scale.config.schema import is_within
from trp_scale.core.batch import Batch
from trp_scale.data.images.dataset import ImageDataset
from trp_scale.data.plan import Plan
from trp_scale.errors import DataError, quote


class Predictions(Protocol):
    """Takes what a task predicts of the measured rows and writes it into files: rank 0 writes, whatever rank predicts.
    Rows that are only there to fill a batch are left out, so that any number of ranks writes the same."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """What `Measured.predict` gave for a micro-batch. Collective."""
        ...

    def finish(self) -> list[Path]:
        """Write what is not written yet; returns the files, or the directory of many. Collective."""
        ...


def write_table(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]], *, separator: str) -> None:
    """Write a table with a header, under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
    temporary.replace(path)


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
    """Of all images of a data set."""
    keys = dataset.samples.keys()
    wrong = next((key for key in keys if not is_within(key)), None)
    if wrong is not None:
        raise DataError(f"{dataset.directory}: an image has the key {quote(wrong)}, which names no file in a folder")
    if max(Counter(keys).values()) > 1:
        counts = np.diff(dataset.samples.starts).tolist()
        tars = [path.stem for path, count in zip(dataset.samples.shards, counts, strict=True) for _ in range(count)]
        keys = [f"{tar}/{key}" for tar, key in zip(tars, keys, strict=True)]
    return [f"{dataset.name}/{key}" for key in keys] if dataset.name else keys
