"""Training and test images of a probe."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trp_scale.core.batch import Batch
from trp_scale.data.plan import HeldOutPlan, TrainPlan, held_out
from trp_scale.data.sources import TrainSource
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.classification.batch import MeasuredImages, TrainingImages
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import LabelledImages, open_labelled
from trp_scale.finetuning.measurement import all_blocks, read_once

BlockMasks = list[npt.NDArray[np.bool_]]
"""[blocks] of each data set: selected blocks."""


@dataclass(frozen=True, kw_only=True)
class ProbedImages:
    """Opened shards of images with classes.

    Attributes:
        config: image transform (crops, augmentation) and batches: batch.micro_size images per forward pass.
        path: of a data set or mixture.
        opened: data sets.
    """

    config: ClassificationTaskConfig
    path: str
    opened: LabelledImages

    @property
    def digest(self) -> str:
        """Digest of all images and classes."""
        return " ".join(dataset.digest() for dataset in self.opened.datasets)

    def held_out(self, fraction: float) -> npt.NDArray[np.bool_]:
        """Return [n] which images are held out for this data.validation_fraction, in stored order."""
        blocks = (dataset.blocks for dataset in self.opened.datasets)
        return np.concatenate(
            [np.repeat(mask, block.rows) for mask, block in zip(self.held_blocks(fraction), blocks, strict=True)]
        )

    def held_blocks(self, fraction: float) -> BlockMasks:
        """Return [blocks] of each data set that are held out for this data.validation_fraction."""
        return [
            held_out(dataset.blocks.identities, fraction, where=str(dataset.directory))
            for dataset in self.opened.datasets
        ]

    def labels(self, chosen: BlockMasks) -> npt.NDArray[np.int64]:
        """Return the classes [n] of the images in these blocks, in stored order."""
        pairs = zip(self.opened.datasets, chosen, strict=True)
        return np.concatenate([data.samples.labels[np.repeat(mask, data.blocks.rows)] for data, mask in pairs])

    def batches(self, group: Group) -> Iterator[Batch]:
        """Return this rank's micro-batches of all images, each once and in stored order; padding rows have
        row_weights 0."""
        return self.once(all_blocks([dataset.blocks for dataset in self.opened.datasets]), group)

    def once(self, chosen: BlockMasks, group: Group) -> Iterator[Batch]:
        """Return the batches of the chosen blocks, like `batches`."""
        config = copy.deepcopy(self.config)
        config.downstream.classes = len(self.opened.classes)
        rows = self.opened.rows(MeasuredImages(config, self.opened.datasets, self.opened.meta))
        plan = HeldOutPlan(members=rows.members(self.opened.paths, chosen))
        return read_once(rows, plan, self.config, group)

    def random_crops(self, group: Group, fraction: float, *, smallest: float, batch: int, seed: int) -> TrainSource:
        """Return an endless source of random crops, flipped half of the time, of the images that are not held out, in
        training order.

        Args:
            smallest: smallest area of a crop relative to the image.
            batch: images per batch, over all ranks.
            seed: for order and crops.
        """
        config = copy.deepcopy(self.config)
        config.crops.min_scale, config.crops.max_scale, config.crops.flip = smallest, 1.0, 0.5
        config.batch.global_size, config.training.seed = batch, seed
        config.downstream.classes = len(self.opened.classes)
        builder = TrainingImages(config, self.opened.datasets, self.opened.meta)
        chosen = [~mask for mask in self.held_blocks(fraction)]
        plan = TrainPlan(
            seed=seed,
            members=self.opened.rows(builder).members(self.opened.paths, chosen),
            blocks_per_group=config.data.blocks_per_group,
        )
        flags = ("linear.batch_size", "batch_size")
        return TrainSource(plan, builder, config, rank=group.rank, world=group.size, pin_memory=False, flags=flags)


def open_probed(config: ClassificationTaskConfig, path: str) -> ProbedImages:
    """Open shards of images with classes. Raises DataError for damaged data, RefusedError for images without
    classes."""
    return ProbedImages(config=config, path=path, opened=open_labelled(path))
