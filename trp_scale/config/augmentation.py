"""Augmentation of a classifier's training images, and the part of a measured image that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class AugmentationConfig:
    """Augmentation of training images and of their classes, beside crops and flips (--crops). Defaults are none."""

    magnitude: int = 0
    """RandAugment's magnitude, of 10 (Cubuk et al. 2020; He et al.: 9); 0 = no RandAugment."""
    magnitude_deviation: float = 0.5
    """Standard deviation of each operation's magnitude: RandAugment (9, 0.5)."""
    operations: int = 2
    """RandAugment's operations on an image, each with probability 1/2 (timm)."""
    colour_jitter: float = 0.0
    """Brightness, contrast and saturation change by factors from 1 - this to 1 + this."""
    erasing: float = 0.0
    """Probability that a rectangle of 2 % to 33 % of the image becomes noise (Zhong et al. 2020)."""
    mixup: float = 0.0
    """Alpha of the beta distribution of mixup's shares (Zhang et al. 2018; He et al.: 0.8); 0 = no mixup. Neighbours
    2 i and 2 i + 1 of the global order are mixed, each pair with a share of its own."""
    cutmix: float = 0.0
    """Alpha of cutmix's shares (Yun et al. 2019; He et al.: 1.0); 0 = no cutmix. With mixup, half of the pairs each."""
    mixing: float = 1.0
    """Share of the pairs that are mixed at all, where mixup or cutmix is on."""
    smoothing: float = 0.0
    """Label smoothing: this share of each target is spread evenly over all classes (Szegedy et al. 2016)."""
    measured: Literal["centre", "whole"] = "centre"
    """The part of a measured image that the classifier sees. centre: the shorter side is resized to crops.size /
    centre_share, and the central square is taken. whole: the whole image, squashed to a square."""
    centre_share: float = 0.875
    """Side of the central square over the image's shorter side: 224 of 256 pixels; above 224 pixels MAE takes 1."""
