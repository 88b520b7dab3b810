"""Settings of image classification: the head, and the augmentation of training images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trp_scale.config.finetuning import ImageDownstreamConfig, ImageTaskConfig
from trp_scale.config.registry import component
from trp_scale.config.settings import Section, setting


@dataclass(kw_only=True)
class ClassificationDownstreamConfig(ImageDownstreamConfig):
    """The task, the length of the run, the measured images and the head."""

    kind: Literal["classification"] = "classification"
    """The classes of images."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of the head's input."""
    pooling: Literal["mean", "class"] = "mean"
    """The head reads the mean of the patch tokens, or the class token."""


@dataclass(kw_only=True)
class AugmentationConfig(Section):
    """Augmentation of training images and of their classes, beside crops and flips (--crops). Defaults are none."""

    magnitude: int = setting(0, at_least=0, at_most=10)
    """RandAugment's magnitude, of 10 (Cubuk et al. 2020; He et al.: 9); 0 = no RandAugment."""
    magnitude_deviation: float = setting(0.5, at_least=0)
    """Standard deviation of each operation's magnitude: RandAugment (9, 0.5)."""
    operations: int = setting(2, at_least=1)
    """RandAugment's operations on an image, each with probability 1/2 (timm)."""
    colour_jitter: float = setting(0.0, at_least=0)
    """Brightness, contrast and saturation change by factors from 1 - this to 1 + this."""
    erasing: float = setting(0.0, at_least=0, at_most=1)
    """Probability that a rectangle of 2 % to 33 % of the image becomes noise (Zhong et al. 2020)."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of the beta distribution of mixup's shares (Zhang et al. 2018; He et al.: 0.8); 0 = no mixup. Neighbours
    2 i and 2 i + 1 of the global order are mixed, each pair with a share of its own."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of cutmix's shares (Yun et al. 2019; He et al.: 1.0); 0 = no cutmix. With mixup, half of the pairs each."""
    mixing: float = setting(1.0, at_least=0, at_most=1)
    """Share of the pairs that are mixed at all, where mixup or cutmix is on."""
    smoothing: float = setting(0.0, at_least=0, below=1)
    """Label smoothing: this share of each target is spread evenly over all classes (Szegedy et al. 2016)."""
    measured: Literal["centre", "whole"] = "centre"
    """The part of a measured image that the classifier sees. centre: the shorter side is resized to crops.size /
    centre_share, and the central square is taken. whole: the whole image, squashed to a square."""
    centre_share: float = setting(0.875, above=0, at_most=1)
    """Side of the central square over the image's shorter side: 224 of 256 pixels; above 224 pixels MAE takes 1."""

    def problems(self, config: Any) -> Iterator[str]:
        micro_size = config.batch.micro_size
        if micro_size != "auto" and (self.mixup > 0 or self.cutmix > 0) and micro_size % 2:
            yield (
                f"--batch.micro_size is {micro_size}, and mixup and cutmix mix neighbours, two by two; allowed: even "
                f"numbers, for example {micro_size + 1}, or --augmentation.mixup 0 --augmentation.cutmix 0"
            )


@component("task", "classification", "trp_scale.finetuning.classification.task:ClassificationTask")
@dataclass(kw_only=True)
class ClassificationTaskConfig(ImageTaskConfig):
    """The classes of images (He et al., A.1; TRP 001 Table 7; AdPE A)."""

    cuts_crops: ClassVar[bool] = True

    downstream: ClassificationDownstreamConfig = field(default_factory=ClassificationDownstreamConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.crops.count != 1:
            yield f"--crops.count is {self.crops.count}, allowed for classification: 1"
