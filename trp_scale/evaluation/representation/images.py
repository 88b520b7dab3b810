"""Images of a data set to look at: some of them, whole, in an order that depends on nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trp_scale.batch import Batch
from trp_scale.config import Config, CropsConfig, RefusedError
from trp_scale.data.hashing import Integers
from trp_scale.data.index import read_json
from trp_scale.data.kinds import Rows, open_rows
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import HeldOutPlan

BATCH = 64
"""Images of one forward pass."""


class ImageChoice(NamedTuple):
    """Images of one data set.

    Attributes:
        data: its directory.
        split: what its images are for, as was said when they were sharded: train or test.
        positions: [n] of the chosen ones in stored order, shuffled: the first few are of all classes.
        classes: names by number; None without names.
        labelled: whether the images have classes.
    """

    data: Path
    split: str
    positions: Integers
    classes: tuple[str, ...] | None
    labelled: bool

    def class_name(self, label: int) -> str:
        """The class of an image, in words where it has some."""
        return str(label) if self.classes is None or label < 0 else self.classes[label]


def choose_images(data: Path, most: int) -> ImageChoice:
    """At most so many of a data set's images, all of them for 0; the same ones every time.

    Raises:
        DataError: it is missing or damaged.
        RefusedError: it holds no images.
    """
    rows, plan = _open(reading_settings(Config(), size=32), data)
    order = np.random.default_rng(0).permutation(plan.rows)
    settings = read_json(data / "dataset.json").get("settings") or {}
    return ImageChoice(
        data=data,
        split=str(settings.get("split", "train")),
        positions=order[:most] if most > 0 else order,
        classes=rows.meta.classes,  # type: ignore[union-attr]
        labelled="cls" in rows.meta.suffixes,  # type: ignore[union-attr]
    )


def reading_settings(config: Config, size: int) -> Config:
    """The settings with the whole of each image, squashed to a square of `size` pixels, as its one crop."""
    config = copy.deepcopy(config)
    config.objective.kind = "mae"
    config.vision.patch_size, config.masking.ratio = size // 2, 0.5  # of the masks, which nobody looks at
    config.masking.network = "none"
    config.crops = CropsConfig(
        size=size, min_scale=1.0, max_scale=1.0, flip=0.0, interpolation=config.crops.interpolation
    )
    return config


def read_images(config: Config, data: Path, positions: Integers) -> Iterator[Batch]:
    """Batches of the images at these positions, made as `config` says.

    Raises:
        RefusedError: one of them cannot be read, or the data lacks a modality that `config` asks for.
    """
    rows, plan = _open(config, data)
    for first in range(0, len(positions), BATCH):
        batch = rows.builder.build(plan.locate(positions[first : first + BATCH]), first)
        if batch.corrupt:
            raise RefusedError(f"{data}: {', '.join(batch.corrupt[:3])} cannot be read; copy or shard the data again")
        yield batch


def _open(config: Config, data: Path) -> tuple[Rows, HeldOutPlan]:
    paths = [MemberPath(name="", weight=Fraction(1), path=data)]
    rows = open_rows(config, paths)
    everything = np.ones(len(rows.blocks[0].keys), dtype=np.bool_)
    return rows, HeldOutPlan(members=rows.members(paths, [everything]))
