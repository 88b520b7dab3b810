"""Settings of fine-tuning that gives each pixel a value: segmentation and depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trp_scale.config.finetuning import ImageDownstreamConfig, ImageTaskConfig
from trp_scale.config.registry import component
from trp_scale.config.settings import Section, setting

MOST_SCALE = 10.0
"""Largest scale of a jitter: a hundredth of the image fills the crop."""

WIDTH_UNIT = 8
"""Heads have 3/8 and half as many channels in places."""

LEVELS = 4


@dataclass(kw_only=True)
class DenseConfig(Section):
    """Head, augmentation and measurement of segmentation and depth."""

    head: Literal["linear", "convnext", "upernet", "dpt"] = "linear"
    """linear: one layer on each token. convnext: four ConvNeXt blocks on a grid four times as fine (MultiMAE). upernet:
    a feature pyramid under transformers' UPerNet. dpt: transformers' DPT neck, with its depth head (depth only)."""
    width: int = setting(0, at_least=0)
    """Channels within the head; 0 = the head's own: 384 for convnext, 512 for upernet, 256 for dpt."""
    after: list[int] = field(default_factory=list)
    """upernet and dpt: the four blocks, numbered from 0, whose tokens the head reads; empty = the last of each quarter.
    MAE's UPerNet reads 3 5 7 11 of 12."""
    auxiliary_weight: float = setting(0.0, at_least=0)
    """upernet: weight of the loss of a small second head on the third of these blocks, as MMSegmentation has it (0.4
    there); 0 = none."""
    min_scale: float = 0.1
    """Large-scale jitter (Ghiasi et al. 2021): smallest size of the image in a crop, as a share of crops.size."""
    max_scale: float = 2.0
    """Large-scale jitter: largest size of the image, as a share of crops.size. A larger image is cut at a random place.
    A smaller one is surrounded by grey, which counts nowhere."""
    scaled_side: Literal["longer", "shorter"] = "longer"
    """The side of the image that is crops.size at a scale of 1: the longer one (Ghiasi et al.), or the shorter one
    (MMSegmentation)."""
    measured: Literal["windows", "squashed"] = "windows"
    """How an image is measured, at the full resolution of its label. windows: its shorter side is scaled to crops.size,
    and the predictions of overlapping windows of that size are averaged. squashed: the whole image as one square."""
    overlap: float = setting(1 / 3, at_least=0, at_most=0.9)
    """windows: least share of a window that the next one repeats."""

    def problems(self, config: Any) -> Iterator[str]:
        size, patch_size, layers = config.crops.size, config.vision.patch_size, config.model.layers
        if not 0 < self.min_scale <= self.max_scale <= MOST_SCALE:
            yield (
                f"--dense.min_scale is {self.min_scale} and --dense.max_scale {self.max_scale}, allowed: more than 0, "
                f"at most {MOST_SCALE:g}, the first not above the second"
            )
        if self.width % WIDTH_UNIT:
            yield f"--dense.width is {self.width}, allowed: 0 (the head's own) or multiples of {WIDTH_UNIT}"
        if self.auxiliary_weight > 0 and self.head != "upernet":
            yield (
                f"--dense.auxiliary_weight is {self.auxiliary_weight}, allowed: 0 with --dense.head {self.head}, more "
                "with upernet"
            )
        if self.head == "upernet" and size < 2 * patch_size:
            yield (
                f"--crops.size is {size}, allowed with --dense.head upernet: two patches or more, {2 * patch_size} "
                "pixels, since it also reads a map of half the patches"
            )
        known = all(0 <= number < layers for number in self.after)
        if self.after and (len(self.after) != LEVELS or self.after != sorted(self.after) or not known):
            yield (
                f"--dense.after is {' '.join(map(str, self.after))}, allowed: {LEVELS} blocks in ascending order, from "
                f"0 to {layers - 1}"
            )


@dataclass(kw_only=True)
class DenseTaskConfig(ImageTaskConfig):
    """One fine-tuning run on pixels."""

    dense: DenseConfig = field(default_factory=DenseConfig)


@dataclass(kw_only=True)
class SegmentationDownstreamConfig(ImageDownstreamConfig):
    """The task, the length of the run and the measured images."""

    kind: Literal["segmentation"] = "segmentation"
    """The class of each pixel."""


@dataclass(kw_only=True)
class SegmentationConfig(DenseConfig):
    """Head, augmentation and measurement of segmentation."""

    ignored: list[int] = field(default_factory=list)
    """Numbers of void classes. They are never learned, predicted or counted. 255 is always void."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.head == "dpt":
            yield "--dense.head is dpt, allowed for segmentation: linear, convnext, upernet"


@component("task", "segmentation", "trp_scale.finetuning.dense.task:SegmentationTask")
@dataclass(kw_only=True)
class SegmentationTaskConfig(DenseTaskConfig):
    """The class of each pixel (TRP 4.2.3 and Table 7, MLO-MAE B.6, AdPE 5.2)."""

    downstream: SegmentationDownstreamConfig = field(default_factory=SegmentationDownstreamConfig)
    dense: SegmentationConfig = field(default_factory=SegmentationConfig)


@dataclass(kw_only=True)
class DepthDownstreamConfig(ImageDownstreamConfig):
    """The task, the length of the run and the measured images."""

    kind: Literal["depth"] = "depth"
    """The distance of each pixel."""


@dataclass(kw_only=True)
class DepthConfig(DenseConfig):
    """Head, augmentation, units and measurement of depth."""

    target: Literal["metric", "inverse"] = "metric"
    """Learn depth as it is stored, or its inverse (disparity). Maps whose larger numbers are nearer are inverse
    already, and are learned so."""
    alignment: Literal["none", "scale_shift"] = "none"
    """Measure predictions as they are, or after the scale and shift for each image that fit its map best in
    least squares (Ranftl et al. 2022): the only fair way for maps without metres."""
    min_depth: float = setting(1e-3, above=0)
    """Smallest depth in metres, or in units of a map without metres. Nearer pixels count nowhere, and nothing
    nearer is predicted."""
    max_depth: float = setting(0.0, at_least=0)
    """Largest depth; 0 = no limit. Farther pixels count nowhere, and nothing farther is predicted. NYUv2: 10."""
    region: Literal["whole", "eigen"] = "whole"
    """Pixels that are measured. whole: every valid one, as in MultiMAE's code. eigen: rows 45 to 471 and columns
    41 to 601 of 480 x 640 (Eigen et al. 2014), in proportion for other sizes."""
    threshold: Literal["image", "batch"] = "image"
    """The reverse Huber loss is linear up to a fifth of the largest error of each image, or of the global batch
    (MultiMAE's code takes each rank's batch). batch takes one more forward pass, unless one rank holds the batch in one
    micro-batch."""
    depth_mean: float = 0.0
    """The head predicts target = depth_mean + depth_deviation x output. The data set it if depth_deviation is
    0."""
    depth_deviation: float = setting(0.0, at_least=0)
    """Unit of the head's output; 0 = mean and deviation of up to 256 training maps."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.max_depth and self.max_depth <= self.min_depth:
            yield (
                f"--dense.max_depth is {self.max_depth}, allowed: more than --dense.min_depth {self.min_depth}, or 0 "
                "for no limit"
            )


@component("task", "depth", "trp_scale.finetuning.dense.depth:DepthTask")
@dataclass(kw_only=True)
class DepthTaskConfig(DenseTaskConfig):
    """The distance of each pixel (TRP 4.2.3 and Table 7: NYUv2)."""

    downstream: DepthDownstreamConfig = field(default_factory=DepthDownstreamConfig)
    dense: DepthConfig = field(default_factory=DepthConfig)
