"""Augmentation of cut images: RandAugment, erasing, mixup and cutmix, all by timm, jitter by torchvision.

These libraries draw from the process's generators. So that an image's changes follow from its row's word alone, the
generators are seeded from it before each image and put back after the batch: nothing else in the process notices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, rand_augment_transform
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms.v2 import ColorJitter, functional

from trp_scale.config import CropsConfig
from trp_scale.downstream.classification.settings import AugmentationConfig

HIGHEST = 9.999
"""RandAugment's magnitudes are cut here: at 10, timm would keep no bit of a posterised image, which Pillow refuses."""


@contextmanager
def borrowed_generators() -> Iterator[None]:
    """Python's, numpy's and torch's generators are as before afterwards. Not CUDA's: nothing here draws from those."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(word: int) -> None:
    """Seed all three from a 64-bit word; torch's for the CPU alone (torch.manual_seed would move CUDA's too)."""
    random.seed(word)
    np.random.seed([word & 0xFFFFFFFF, word >> 32])
    torch.default_generator.manual_seed(word >> 1)


class ImageAugmentation:
    """RandAugment, then colour jitter, then erasing; for one image at a time, inside `borrowed_generators`.

    Args:
        settings: which, and how strong.
        crops: side of the images, and how they are resized.
    """

    def __init__(self, settings: AugmentationConfig, crops: CropsConfig) -> None:
        self._rand_augment = None
        if settings.magnitude > 0:
            # The operations that grow stronger with the magnitude (inc1), as He et al. take them.
            name = f"rand-m{settings.magnitude}-n{settings.operations}-mstd{settings.magnitude_deviation:f}-inc1"
            parameters = {
                "img_mean": tuple(round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN),
                "magnitude_max": HIGHEST,
                "interpolation": Image.Resampling[crops.interpolation.upper()],
            }
            self._rand_augment = rand_augment_transform(name, parameters)
        amount = settings.colour_jitter
        self._jitter = ColorJitter(amount, amount, amount) if amount > 0 else None
        self._erasing = RandomErasing(settings.erasing, mode="pixel", device="cpu") if settings.erasing > 0 else None
        self._statistics = torch.tensor([IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD]).view(2, 3, 1, 1)
        self.active = any(each is not None for each in (self._rand_augment, self._jitter, self._erasing))

    def __call__(self, image: Tensor, word: int) -> Tensor:
        """[3, S, S] uint8 -> the same, changed as `word` says."""
        seed_generators(word)
        if self._rand_augment is not None:
            image = functional.pil_to_tensor(self._rand_augment(functional.to_pil_image(image)))
        if self._jitter is not None:
            image = self._jitter(image)
        return image if self._erasing is None else self._erased(image)

    def _erased(self, image: Tensor) -> Tensor:
        """timm's noise is normal where mean and deviation of the data are 0 and 1; beyond black and white it is cut."""
        assert self._erasing is not None
        mean, deviation = self._statistics  # [3, 1, 1]
        normalised = self._erasing((image / 255.0 - mean) / deviation)
        erased: Tensor = ((normalised * deviation + mean) * 255.0).round().clamp(0, 255).to(torch.uint8)
        return erased


class PairMixing:
    """Mixup and cutmix of two images and their classes, and label smoothing.

    Args:
        settings: alphas, smoothing.
        classes: C.

    Attributes:
        active: whether images are mixed.
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
        """[R] classes -> [R, C] smoothed."""
        targets: Tensor = mixup_target(labels, self._classes, smoothing=self._smoothing)
        return targets

    def __call__(self, images: Tensor, labels: Tensor, word: int) -> tuple[Tensor, Tensor]:
        """One pair, inside `borrowed_generators`.

        Args:
            images: [2, 3, S, S] uint8.
            labels: [2].
            word: all draws come from it.

        Returns:
            images as given, values rounded; targets [2, C] that add up to 1.
        """
        seed_generators(word)
        mixed, targets = self._mixup(images.float(), labels)
        return mixed.round().clamp(0, 255).to(torch.uint8), targets
