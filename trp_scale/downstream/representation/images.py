"""A few images of a data set to look at, the same ones every time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.index import read_json
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import HeldOutPlan, Member
from trp_scale.downstream.classification.batch import MeasuredImages
from trp_scale.downstream.classification.settings import ClassificationTaskConfig
from trp_scale.upstreams.base import upstream_of

BATCH = 64
"""Images of one forward pass."""


class ImageChoice(NamedTuple):
    """Images of one data set.

    Attributes:
        dataset: they are from.
        positions: [n] of the chosen ones in stored order, shuffled, so that the first few are of many classes.
        classes: names, or numbers where there are none; empty where the images have no classes.
    """

    dataset: ImageDataset
    positions: Integers
    classes: tuple[str, ...]

    def first(self, count: int) -> ImageChoice:
        """Fewer of them."""
        return self._replace(positions=self.positions[:count])

    def class_name(self, label: int) -> str:
        """The class of an image, in words where it has some."""
        return self.classes[label] if 0 <= label < len(self.classes) else ""


def choose_images(data: Path, most: int) -> ImageChoice:
    """At most so many of a data set's images, all of them for 0.

    Raises:
        DataError: it is missing or damaged.
        RefusedError: it holds no images.
    """
    kind = read_json(data / "dataset.json").get("kind")
    if kind != "image":
        raise RefusedError(f"--data {data}: kind {kind!r} found, 'image' allowed: shards of trp-scale shard-images")
    dataset = open_image_dataset(data)
    classes = dataset.meta.classes or ()
    if "cls" in dataset.meta.suffixes and not classes:
        classes = tuple(str(number) for number in range(1 + int(dataset.samples.labels.max())))
    order = np.random.default_rng(0).permutation(dataset.samples.rows)
    return ImageChoice(dataset, order[:most] if most > 0 else order, classes)


def measured_images(config: ClassificationTaskConfig, choice: ImageChoice) -> Iterator[Batch]:
    """Batches of the images as a classifier of these settings is measured on them (crops.size, augmentation).

    Raises:
        RefusedError: an image cannot be read.
    """
    config = copy.deepcopy(config)
    config.downstream.classes = max(1, len(choice.classes))
    return planned_batches(MeasuredImages(config, [choice.dataset], choice.dataset.meta), choice)


def trained_images(config: Config, choice: ImageChoice) -> Iterator[Batch]:
    """Batches of the images as a pre-training run of these settings makes its own: its crops, masks and modalities.

    Raises:
        RefusedError: an image cannot be read, or the data lacks a modality.
    """
    rows = upstream_of(config).open_rows(
        config, [MemberPath(name="", weight=Fraction(1), path=choice.dataset.directory)]
    )
    return planned_batches(rows.builder, choice)


def planned_batches(builder: BatchBuilder, choice: ImageChoice) -> Iterator[Batch]:
    """What a builder of the data set makes of the chosen images.

    Raises:
        RefusedError: an image cannot be read.
    """
    blocks = choice.dataset.blocks
    everything = np.ones(len(blocks.keys), dtype=np.bool_)
    plan = HeldOutPlan(members=[Member(name="", weight=Fraction(1), table=blocks, chosen=everything)])
    for first in range(0, len(choice.positions), BATCH):
        batch = builder.build(plan.locate(choice.positions[first : first + BATCH]), first)
        if batch.corrupt:
            raise RefusedError(
                f"--data {choice.dataset.directory}: {', '.join(batch.corrupt[:3])} cannot be read; copy or shard the "
                "data again"
            )
        yield batch
