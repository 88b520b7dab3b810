"""How images with classes become a Batch: decoded, cut, augmented, mixed; or cut as they are measured."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Words, mix, name_hash
from trp_scale.data.images.crops import GREY, Cropper, cut_images
from trp_scale.data.images.dataset import ImageDataset, ImageMeta
from trp_scale.data.images.rows import DecodedRows, RowReader
from trp_scale.data.plan import Addresses, row_states
from trp_scale.downstream.classification.augment import ImageAugmentation, PairMixing, borrowed_generators
from trp_scale.downstream.classification.settings import ClassificationTaskConfig

_AUGMENT = np.uint64(name_hash("augment"))
_PAIR = np.uint64(name_hash("augment: pair"))


class TrainingImages:
    """Makes batches of R augmented images of S x S pixels with targets over C classes.

    Fields of the batch, first dimension rows:
        images [R, 3, S, S] uint8: red, green, blue.
        targets [R, C] float32: shares of the classes, adding up to 1.
        labels [R] int64: the class of the image itself, or -1.
        row_weights [R] float32: 1, or 0 for a row that cannot be decoded; it then is grey, and its neighbour unmixed.

    All draws come from (training.seed, row key, epoch), those of a pair from its first row's: with pairs that never lie
    across two micro-batches, the global batch is the same however it is split.
    """

    def __init__(self, config: ClassificationTaskConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._seed = config.training.seed
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._cropper = Cropper(config.crops)
        self._augmentation = ImageAugmentation(config.augmentation, config.crops)
        self._mixing = PairMixing(config.augmentation, config.downstream.classes)

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=0)
        rows = self._rows.read(addresses)
        images = cut_images(self._cropper, self._cropper.draw(states, rows.sizes), rows).squeeze(1)  # [R, 3, S, S]
        labels = torch.tensor([0 if sample is None else sample.label for sample in rows.samples])
        targets = self._mixing.targets(labels)  # [R, C]
        if self._augmentation.active or self._mixing.active:
            with borrowed_generators():
                self._change(images, targets, labels, states, rows, start)
        return rows.batch({"images": images, "targets": targets}, addresses, start=start, began=began)

    def _change(
        self, images: Tensor, targets: Tensor, labels: Tensor, states: Words, rows: DecodedRows, start: int
    ) -> None:
        """Augment each image, then mix neighbours, in place."""
        there = [sample is not None for sample in rows.samples]
        if self._augmentation.active:
            for row, word in enumerate(mix(states ^ _AUGMENT).tolist()):
                if there[row]:
                    images[row] = self._augmentation(images[row], word)
        if not self._mixing.active:
            return
        if start % 2 or len(there) % 2:
            raise ValueError(f"rows {start} to {start + len(there)}: pairs to mix begin and end at even positions")
        for first, word in zip(range(0, len(there), 2), mix(states[::2] ^ _PAIR).tolist(), strict=True):
            pair = slice(first, first + 2)
            if all(there[pair]):
                images[pair], targets[pair] = self._mixing(images[pair], labels[pair], word)


class MeasuredImages:
    """Makes batches of the images that a classifier is measured on: fields as `TrainingImages`', targets 1 for the
    class and 0 for all others, nothing drawn at random."""

    def __init__(self, config: ClassificationTaskConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._classes = config.downstream.classes
        self._size, self._settings = config.crops.size, config.augmentation
        self._mode = InterpolationMode[config.crops.interpolation.upper()]

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        rows = self._rows.read(addresses)
        count = len(rows.samples)
        images = torch.full((count, 3, self._size, self._size), GREY, dtype=torch.uint8)
        targets = torch.zeros(count, self._classes)
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                images[row] = self.cut(sample.image)
                targets[row, sample.label] = 1.0
        return rows.batch({"images": images, "targets": targets}, addresses, start=start, began=began)

    def cut(self, image: Tensor) -> Tensor:
        """[3, H, W] uint8 -> [3, S, S]."""
        size = self._size
        if self._settings.measured == "whole":
            return self._resized(image, [size, size])
        shorter = max(size, round(size / self._settings.centre_share))
        return functional.center_crop(self._resized(image, [shorter]), [size, size])  # type: ignore[no-any-return]

    def _resized(self, image: Tensor, sides: list[int]) -> Tensor:
        """To height and width; to the one side given, the shorter one."""
        resized: Tensor = functional.resize(image, sides, interpolation=self._mode, antialias=True)
        return resized
