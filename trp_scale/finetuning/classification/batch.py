"""Batches of images with classes: augmented for training, resized or cropped for evaluation.

timm's RandAugment, erasing, mixup and cutmix, and torchvision's colour jitter, use global random generators. These are
seeded for each image from its row's 64-bit word, and restored after the batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, rand_augment_transform
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import ColorJitter, functional

from trp_scale.config.images import CropConfig
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Words, mix, name_hash
from trp_scale.data.images.crops import GREY, Cropper, cut_images
from trp_scale.data.images.dataset import DecodedRows, ImageDataset, ImageMeta, RowReader
from trp_scale.data.plan import Addresses, row_states
from trp_scale.finetuning.classification.settings import AugmentationConfig, ClassificationTaskConfig


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch (CPU) at exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(word: int) -> None:
    """Seed all three from a 64-bit word; torch.manual_seed would seed CUDA too."""
    random.seed(word)
    np.random.seed([word & 0xFFFFFFFF, word >> 32])
    torch.default_generator.manual_seed(word >> 1)


class ImageAugmentation:
    """Applies RandAugment, colour jitter and erasing to one image; call it inside `restored_generators`."""

    def __init__(self, settings: AugmentationConfig, crops: CropConfig) -> None:
        self._rand_augment = None
        if settings.magnitude > 0:
            # inc1: the variants of operations that grow stronger with the magnitude, as in He et al.
            name = f"rand-m{settings.magnitude}-n{settings.operations}-mstd{settings.magnitude_deviation:f}-inc1"
            parameters = {
                "img_mean": tuple(round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN),
                "magnitude_max": 9.999,  # at 10, timm's posterize keeps 0 bits, which Pillow refuses
                "interpolation": Image.Resampling[crops.interpolation.upper()],
            }
            self._rand_augment = rand_augment_transform(name, parameters)
        amount = settings.colour_jitter
        self._jitter = ColorJitter(amount, amount, amount) if amount > 0 else None
        self._erasing = RandomErasing(settings.erasing, mode="pixel", device="cpu") if settings.erasing > 0 else None
        self._statistics = torch.tensor([IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD]).view(2, 3, 1, 1)
        self.active = any(step is not None for step in (self._rand_augment, self._jitter, self._erasing))

    def __call__(self, image: Tensor, word: int) -> Tensor:
        """Augment an image [3, S, S] uint8; `word` is the seed."""
        seed_generators(word)
        if self._rand_augment is not None:
            image = functional.pil_to_tensor(self._rand_augment(functional.to_pil_image(image)))
        if self._jitter is not None:
            image = self._jitter(image)
        return image if self._erasing is None else self._erase(image)

    def _erase(self, image: Tensor) -> Tensor:
        """Erase a rectangle; timm's noise is standard normal, so the image is normalised first."""
        assert self._erasing is not None
        mean, deviation = self._statistics  # [3, 1, 1]
        normalised = self._erasing((image / 255.0 - mean) / deviation)
        erased: Tensor = ((normalised * deviation + mean) * 255.0).round().clamp(0, 255).to(torch.uint8)
        return erased


class PairMixing:
    """Mixup and cutmix of pairs of images, and label smoothing.

    Args:
        classes: C.

    Attributes:
        active: whether mixup or cutmix is on.
    """

    def __init__(self, settings: AugmentationConfig, classes: int) -> None:
        self._smoothing, self._classes = settings.smoothing, classes
        self.active = settings.mixup > 0 or settings.cutmix > 0
        self._mixup = Mixup(
            mixup_alpha=settings.mixup,
            cutmix_alpha=settings.cutmix,
            prob=settings.mixing,
            mode="pair",
            label_smoothing=settings.smoothing,
            num_classes=classes,
        )

    def targets(self, labels: Tensor) -> Tensor:
        """Return smoothed targets [R, C] of classes [R]."""
        targets: Tensor = mixup_target(labels, self._classes, smoothing=self._smoothing)
        return targets

    def __call__(self, images: Tensor, labels: Tensor, word: int) -> tuple[Tensor, Tensor]:
        """Mix one pair, inside `restored_generators`.

        Args:
            images: [2, 3, S, S] uint8.
            labels: [2].
            word: seed.

        Returns:
            Mixed images [2, 3, S, S] uint8, and targets [2, C] with rows that sum to 1.
        """
        seed_generators(word)
        mixed, targets = self._mixup(images.float(), labels)
        return mixed.round().clamp(0, 255).to(torch.uint8), targets


_AUGMENT = np.uint64(name_hash("augment"))
_PAIR = np.uint64(name_hash("augment: pair"))


class TrainingImages(BatchBuilder):
    """Builds batches of R augmented images of S x S pixels, with targets over C classes.

    Fields of the batch:
        images [R, 3, S, S] uint8: RGB.
        targets [R, C] float32: class probabilities.
        labels [R] int64: class before mixing, or -1.
        row_weights [R] float32: 1; 0 for an undecodable row, which is grey and not mixed.

    Random numbers depend on (training.seed, row key, epoch), for a pair on those of its first row. A pair never spans
    two micro-batches, so the global batch does not depend on how it is split.
    """

    def __init__(self, config: ClassificationTaskConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._seed = config.training.seed
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._cropper = Cropper(config.crops)
        self._augmentation = ImageAugmentation(config.augmentation, config.crops)
        self._mixing = PairMixing(config.augmentation, config.downstream.classes)

    def build(self, addresses: Addresses, start: int) -> Batch:
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=0)
        rows = self._rows.read(addresses, self._cropper.scales(states))
        images = cut_images(self._cropper, self._cropper.draw(states, rows.sizes), rows).squeeze(1)  # [R, 3, S, S]
        labels = torch.tensor([0 if sample is None else sample.label for sample in rows.samples])
        targets = self._mixing.targets(labels)  # [R, C]
        if self._augmentation.active or self._mixing.active:
            with restored_generators():
                self._change(images, targets, labels, states, rows, start)
        return rows.batch({"images": images, "targets": targets}, addresses, start=start, began=began)

    def _change(
        self, images: Tensor, targets: Tensor, labels: Tensor, states: Words, rows: DecodedRows, start: int
    ) -> None:
        """Augment each image, then mix pairs of neighbours, in place."""
        present = [sample is not None for sample in rows.samples]
        if self._augmentation.active:
            for row, word in enumerate(mix(states ^ _AUGMENT).tolist()):
                if present[row]:
                    images[row] = self._augmentation(images[row], word)
        if not self._mixing.active:
            return
        if start % 2 or len(present) % 2:
            raise ValueError(f"rows {start} to {start + len(present)}: mixing needs even positions")
        for first, word in zip(range(0, len(present), 2), mix(states[::2] ^ _PAIR).tolist(), strict=True):
            pair = slice(first, first + 2)
            if all(present[pair]):
                images[pair], targets[pair] = self._mixing(images[pair], labels[pair], word)


class MeasuredImages(BatchBuilder):
    """Builds batches of measured images without augmentation; fields as `TrainingImages`, with one-hot targets."""

    def __init__(self, config: ClassificationTaskConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._classes = config.downstream.classes
        self._size, self._settings = config.crops.size, config.augmentation
        self._mode = InterpolationMode[config.crops.interpolation.upper()]

    def build(self, addresses: Addresses, start: int) -> Batch:
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
        """Resize and crop an image [3, H, W] uint8 to [3, S, S]."""
        size = self._size
        if self._settings.measured == "whole":
            return self._resize(image, [size, size])
        shorter = max(size, round(size / self._settings.centre_share))
        return functional.center_crop(self._resize(image, [shorter]), [size, size])  # type: ignore[no-any-return]

    def _resize(self, image: Tensor, sides: list[int]) -> Tensor:
        resized: Tensor = functional.resize(image, sides, interpolation=self._mode, antialias=True)
        return resized
