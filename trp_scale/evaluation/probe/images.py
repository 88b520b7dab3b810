"""The images that a probe learns from and is measured on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trp_scale.core.batch import Batch
from trp_scale.data.plan import HeldOutPlan, TrainPlan
from trp_scale.data.split import held_out
from trp_scale.data.train_source import TrainSource
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.classification.batch import MeasuredImages, TrainingImages
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import LabelledImages, open_labelled
from trp_scale.finetuning.measurement import every_block, read_once

BlockMasks = list[npt.NDArray[np.bool_]]
"""[blocks] of each data set: which are meant."""


@dataclass(frozen=True, kw_only=True)
class ProbedImages:
    """Opened shards of images with classes.

    Attributes:
        config: which part of an image is seen (crops, augmentation), and the batches: batch.micro_size images are one
            forward pass.
        path: of the data set, or a mixture.
        opened: the data sets.
    """

    config: ClassificationTaskConfig
    path: str
    opened: LabelledImages

    @property
    def digest(self) -> str:
        """Equal where every image and its class are the same."""
        return " ".join(dataset.digest() for dataset in self.opened.datasets)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or their numbers."""
        return self.opened.classes

    def held_out(self, fraction: float) -> npt.NDArray[np.bool_]:
        """[n] which images a run of this data.validation_fraction holds out, in stored order."""
        blocks = (dataset.blocks for dataset in self.opened.datasets)
        return np.concatenate(
            [np.repeat(mask, block.rows) for mask, block in zip(self.held_blocks(fraction), blocks, strict=True)]
        )

    def held_blocks(self, fraction: float) -> BlockMasks:
        """[blocks] of each data set, which a run of this data.validation_fraction holds out."""
        return [
            held_out(dataset.blocks.identities, fraction, where=str(dataset.directory))
            for dataset in self.opened.datasets
        ]

    def every_block(self) -> BlockMasks:
        """[blocks] of each data set, all of them."""
        return every_block([dataset.blocks for dataset in self.opened.datasets])

    def labels(self, chosen: BlockMasks) -> npt.NDArray[np.int64]:
        """[n] classes of the images of these blocks, in stored order."""
        pairs = zip(self.opened.datasets, chosen, strict=True)
        return np.concatenate([data.samples.labels[np.repeat(mask, data.blocks.rows)] for data, mask in pairs])

    def batches(self, group: Group) -> Iterator[Batch]:
        """This rank's micro-batches of all images as they are measured, in stored order, each image once; the last ones
        are filled with rows of row_weights 0."""
        return self.once(self.every_block(), group)

    def once(self, chosen: BlockMasks, group: Group) -> Iterator[Batch]:
        """Return the batches of the chosen blocks, like `batches`."""
        config = copy.deepcopy(self.config)
        config.downstream.classes = len(self.classes)
        rows = self.opened.rows(MeasuredImages(config, self.opened.datasets, self.opened.meta))
        plan = HeldOutPlan(members=rows.members(self.opened.paths, chosen))
        return read_once(rows, plan, self.config, group)

    def random_crops(self, group: Group, fraction: float, *, smallest: float, batch: int, seed: int) -> TrainSource:
        """Return the images that are not held out, without end, in the order of training. Crops are random, new in
        every epoch, and mirrored half of the time.

        Args:
            smallest: share of the image's area that a crop shows at least.
            batch: images of a window, over all ranks.
            seed: of the order and the crops.
        """
        config = copy.deepcopy(self.config)
        config.crops.min_scale, config.crops.max_scale, config.crops.flip = smallest, 1.0, 0.5
        config.batch.global_size, config.training.seed = batch, seed
        config.downstream.classes = len(self.classes)
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
    """Open shards of images with classes.

    Raises:
        DataError: the data is missing, damaged or of another format.
        RefusedError: the images have no classes.
    """
    return ProbedImages(config=config, path=path, opened=open_labelled(path))
