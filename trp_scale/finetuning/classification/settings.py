"""Settings of image classification: the head, and the augmentation of training images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trp_scale.config.finetuning import GroupDownstreamConfig, ImageDownstreamConfig, ImageTaskConfig
from trp_scale.config.registry import Section, component, setting


@dataclass(kw_only=True)
class ClassificationDownstreamConfig(GroupDownstreamConfig, ImageDownstreamConfig):
    """Task, length of the run, measured images and head."""

    kind: Literal["classification"] = "classification"
    """The classes of images."""
    dropout: float = setting(0.1, at_least=0, below=1)
    """Dropout of the head's input."""
    pooling: Literal["mean", "class"] = "mean"
    """The head reads the mean of the patch tokens, or the class token."""


@dataclass(kw_only=True)
class AugmentationConfig(Section):
    """Augmentation of training images and targets, in addition to crops and flips (--crops). Off by default."""

    magnitude: int = setting(0, at_least=0, at_most=10)
    """RandAugment's magnitude, up to 10 (Cubuk et al. 2020; He et al.: 9); 0 = off."""
    magnitude_deviation: float = setting(0.5, at_least=0)
    """Standard deviation of each operation's magnitude: RandAugment (9, 0.5)."""
    operations: int = setting(2, at_least=1)
    """RandAugment's operations on an image, each with probability 1/2 (timm)."""
    colour_jitter: float = setting(0.0, at_least=0)
    """Range of the factors for brightness, contrast and saturation: 1 - this to 1 + this."""
    erasing: float = setting(0.0, at_least=0, at_most=1)
    """Probability that a rectangle of 2 % to 33 % of the image becomes noise (Zhong et al. 2020)."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of mixup's beta distribution (Zhang et al. 2018; He et al.: 0.8); 0 = off. Rows 2 i and 2 i + 1 of the
    global order are mixed, each pair with its own share."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of cutmix's beta distribution (Yun et al. 2019; He et al.: 1.0); 0 = off. If mixup is on too, each is used
    for half of the pairs."""
    mixing: float = setting(1.0, at_least=0, at_most=1)
    """Probability that mixup or cutmix is applied to a pair."""
    smoothing: float = setting(0.0, at_least=0, below=1)
    """Label smoothing (Szegedy et al. 2016): share of each target that is spread evenly over all classes."""
    measured: Literal["centre", "whole"] = "centre"
    """The part of a measured image that the classifier sees. centre: the shorter side is resized to crops.size /
    centre_share, and the central square is taken. whole: the whole image, squashed to a square."""
    centre_share: float = setting(0.875, above=0, at_most=1)
    """Side of the central square over the image's shorter side: 224 of 256 pixels; above 224 pixels MAE takes 1."""

    def problems(self, config: Any) -> Iterator[str]:
        micro_size = config.batch.micro_size
        if micro_size != "auto" and (self.mixup > 0 or self.cutmix > 0) and micro_size % 2:
            yield (
                f"--batch.micro_size is {micro_size}, but mixup and cutmix mix pairs of rows; allowed: even numbers, "
                f"for example {micro_size + 1}, or --augmentation.mixup 0 --augmentation.cutmix 0"
            )


@component("task", "classification", "trp_scale.finetuning.classification.task:ClassificationTask")
@dataclass(kw_only=True)
class ClassificationTaskConfig(ImageTaskConfig):
    """Image classification (He et al., A.1; TRP 001 Table 7; AdPE A)."""

    cuts_crops: ClassVar[bool] = True

    downstream: ClassificationDownstreamConfig = field(default_factory=ClassificationDownstreamConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.crops.count != 1:
            yield f"--crops.count is {self.crops.count}, allowed for classification: 1"
