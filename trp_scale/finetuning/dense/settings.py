"""Settings of segmentation and depth estimation; tested in test_task.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trp_scale.config.finetuning import ImageDownstreamConfig, ImageTaskConfig
from trp_scale.config.registry import Section, component, setting

MOST_SCALE = 10.0
"""Largest scale of the jitter: 1/100 of the image fills the crop."""

WIDTH_UNIT = 8
"""Heads also use 3/8 and 1/2 of their width."""

LEVELS = 4

HEAD_SETTINGS = (
    ("auxiliary_weight", 0.0, "upernet"),
    ("norm", "group", "upernet"),
    ("dropout", 0.0, "upernet"),
    ("class_token", True, "dpt"),
    ("raw_tokens", False, "convnext"),
)
"""Settings of a single head: name, value for the other heads, head."""


@dataclass(kw_only=True)
class DenseConfig(Section):
    """Head, augmentation and evaluation of segmentation and depth."""

    head: Literal["linear", "convnext", "upernet", "dpt"] = "linear"
    """linear: one layer on each token. convnext: four ConvNeXt blocks on a grid four times as fine (MultiMAE). upernet:
    a feature pyramid under transformers' UPerNet. dpt: transformers' DPT neck, with its depth head (depth only)."""
    width: int = setting(0, at_least=0)
    """Channels of the head; 0 = 384 for convnext, 512 for upernet, 256 for dpt."""
    after: list[int] = field(default_factory=list)
    """upernet and dpt: four blocks that the head reads, from 0; empty = the last block of each quarter. MAE's UPerNet
    reads 3 5 7 11 of 12."""
    auxiliary_weight: float = setting(0.0, at_least=0)
    """upernet: loss weight of a small second head on the third of these blocks (MMSegmentation: 0.4); 0 = none."""
    norm: Literal["group", "batch"] = "group"
    """upernet: group norms, or batch norms over all ranks (MMSegmentation). Batch norms need one micro-batch per rank
    and step. Their running statistics are those of the weights, also when averaged weights predict."""
    dropout: float = setting(0.0, at_least=0, below=1)
    """upernet: share of channels to drop before the last layer of both heads (MMSegmentation: 0.1)."""
    class_token: bool = True
    """dpt: mix the class token into each patch token before the neck, as in DPT; MultiMAE's head does not."""
    raw_tokens: bool = False
    """convnext: read the last block's tokens without the encoder's norm, as MultiMAE's head."""
    weights: str = ""
    """File of a model that MultiMAE's code has fine-tuned for this task: its head's weights are the initial ones.
    Needs --dense.head dpt --dense.class_token False, or --dense.head convnext --dense.raw_tokens True."""
    position_bias: bool = False
    """Give each block of the encoder a learned bias of attention by head and offset of two patches, zero at the start
    (BEiT; MMSegmentation's MAE)."""
    distortion: bool = False
    """Change brightness, contrast, saturation and hue of training images at random, as MMSegmentation's photometric
    distortion."""
    min_scale: float = 0.1
    """Large-scale jitter (Ghiasi et al. 2021): smallest image size as a share of crops.size."""
    max_scale: float = 2.0
    """Large-scale jitter: largest image size as a share of crops.size. Images larger than the crop are cropped at a
    random position; smaller ones are padded with grey, which has no target."""
    scaled_side: Literal["longer", "shorter"] = "longer"
    """Side of the image that has crops.size pixels at scale 1: longer (Ghiasi et al.) or shorter (MMSegmentation)."""
    measured: Literal["windows", "squashed"] = "windows"
    """Input for evaluation, which is at the label's full resolution. windows: the shorter side is scaled to crops.size,
    and predictions of overlapping square windows are averaged. squashed: the whole image, resized to one square."""
    overlap: float = setting(1 / 3, at_least=0, at_most=0.9)
    """windows: smallest overlap of neighbouring windows, as a share of a window."""

    def problems(self, config: Any) -> Iterator[str]:
        size, patch_size, layers = config.crops.size, config.vision.patch_size, config.model.layers
        if not 0 < self.min_scale <= self.max_scale <= MOST_SCALE:
            yield (
                f"--dense.min_scale is {self.min_scale} and --dense.max_scale {self.max_scale}, allowed: more than 0, "
                f"at most {MOST_SCALE:g}, the first not above the second"
            )
        if self.width % WIDTH_UNIT:
            yield f"--dense.width is {self.width}, allowed: 0 (the head's default) or multiples of {WIDTH_UNIT}"
        for name, default, head in HEAD_SETTINGS:
            if (value := getattr(self, name)) != default and self.head != head:
                yield f"--dense.{name} is {value}, allowed: {default} with --dense.head {self.head}, others with {head}"
        if self.weights and not ((self.head == "dpt" and not self.class_token) or self.raw_tokens):
            yield (
                f"--dense.weights is {self.weights}, allowed with --dense.head dpt --dense.class_token False, or with "
                "--dense.head convnext --dense.raw_tokens True"
            )
        if self.head == "upernet" and size < 2 * patch_size:
            yield (
                f"--crops.size is {size}, allowed with --dense.head upernet: at least two patches, {2 * patch_size} "
                "pixels, since it also reads a map of half the resolution"
            )
        known = all(0 <= number < layers for number in self.after)
        if self.after and (len(self.after) != LEVELS or self.after != sorted(self.after) or not known):
            yield (
                f"--dense.after is {' '.join(map(str, self.after))}, allowed: {LEVELS} blocks in ascending order, from "
                f"0 to {layers - 1}"
            )


@dataclass(kw_only=True)
class DenseTaskConfig(ImageTaskConfig):
    """Settings of dense prediction."""

    dense: DenseConfig = field(default_factory=DenseConfig)


@dataclass(kw_only=True)
class SegmentationDownstreamConfig(ImageDownstreamConfig):
    """Task, length of the run and measured images."""

    kind: Literal["segmentation"] = "segmentation"
    """The class of each pixel."""


@dataclass(kw_only=True)
class SegmentationConfig(DenseConfig):
    """Head, augmentation and evaluation of segmentation."""

    ignored: list[int] = field(default_factory=list)
    """Numbers of classes to treat as void: not learned, predicted or measured. 255 is always void."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.head == "dpt":
            yield "--dense.head is dpt, allowed for segmentation: linear, convnext, upernet"


@component("task", "segmentation", "trp_scale.finetuning.dense.task:SegmentationTask")
@dataclass(kw_only=True)
class SegmentationTaskConfig(DenseTaskConfig):
    """Semantic segmentation (TRP 4.2.3 and Table 7, MLO-MAE B.6, AdPE 5.2)."""

    downstream: SegmentationDownstreamConfig = field(default_factory=SegmentationDownstreamConfig)
    dense: SegmentationConfig = field(default_factory=SegmentationConfig)


@dataclass(kw_only=True)
class DepthDownstreamConfig(ImageDownstreamConfig):
    """Task, length of the run and measured images."""

    kind: Literal["depth"] = "depth"
    """The distance of each pixel."""


@dataclass(kw_only=True)
class DepthConfig(DenseConfig):
    """Head, augmentation, units and evaluation of depth."""

    target: Literal["metric", "inverse"] = "metric"
    """Learn stored depth, or its inverse (disparity). Stored inverse depth (larger is nearer) is learned unchanged and
    needs inverse."""
    alignment: Literal["none", "scale_shift"] = "none"
    """Align predictions before measuring. scale_shift: least-squares scale and shift for each image (Ranftl et al.
    2022), which relative depth needs."""
    min_depth: float = setting(1e-3, above=0)
    """Smallest depth in metres, or in units of a relative map. Nearer pixels are ignored; predictions are clamped."""
    max_depth: float = setting(0.0, at_least=0)
    """Largest depth; 0 = no limit. Farther pixels are ignored; predictions are clamped. NYUv2: 10."""
    region: Literal["whole", "eigen"] = "whole"
    """Measured pixels. whole: all valid ones, as in MultiMAE's code. eigen: rows 45 to 471 and columns 41 to 601 of
    480 x 640 (Eigen et al. 2014), scaled for other sizes."""
    threshold: Literal["image", "batch"] = "image"
    """The reverse Huber loss is linear up to a fifth of the largest error of each image, or of the global batch
    (MultiMAE's code uses each rank's batch). batch needs a second forward pass, except for a single micro-batch on one
    rank."""
    depth_mean: float = 0.0
    """The target is depth_mean + depth_deviation x output of the head. Computed from the data if depth_deviation is
    0."""
    depth_deviation: float = setting(0.0, at_least=0)
    """Unit of the head's output; 0 = compute both from up to 256 training maps."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.max_depth and self.max_depth <= self.min_depth:
            yield (
                f"--dense.max_depth is {self.max_depth}, allowed: more than --dense.min_depth {self.min_depth}, or 0 "
                "(no limit)"
            )


@component("task", "depth", "trp_scale.finetuning.dense.depth:DepthTask")
@dataclass(kw_only=True)
class DepthTaskConfig(DenseTaskConfig):
    """Depth estimation (TRP 4.2.3 and Table 7: NYUv2)."""

    downstream: DepthDownstreamConfig = field(default_factory=DepthDownstreamConfig)
    dense: DepthConfig = field(default_factory=DepthConfig)
