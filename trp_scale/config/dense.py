"""Fine-tuning that gives each pixel a value: segmentation and depth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class DenseConfig:
    """Head, augmentation and measurement of segmentation and depth."""

    head: Literal["linear", "convnext", "upernet", "dpt"] = "linear"
    """linear: one layer on each token. convnext: four ConvNeXt blocks on a grid four times as fine (MultiMAE). upernet:
    a feature pyramid under transformers' UPerNet. dpt: transformers' DPT neck, with its depth head (depth only)."""
    width: int = 0
    """Channels within the head; 0 = the head's own: 384 for convnext, 512 for upernet, 256 for dpt."""
    after: list[int] = field(default_factory=list)
    """upernet and dpt: the four blocks, numbered from 0, whose tokens the head reads; empty = the last of each quarter.
    MAE's UPerNet reads 3 5 7 11 of 12."""
    auxiliary_weight: float = 0.0
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
    ignored: list[int] = field(default_factory=list)
    """segmentation: numbers of void classes. They are never learned, predicted or counted. 255 is always void."""
    measured: Literal["windows", "squashed"] = "windows"
    """How an image is measured, at the full resolution of its label. windows: its shorter side is scaled to crops.size,
    and the predictions of overlapping windows of that size are averaged. squashed: the whole image as one square."""
    overlap: float = 1 / 3
    """windows: least share of a window that the next one repeats."""
    target: Literal["metric", "inverse"] = "metric"
    """depth: learn depth as it is stored, or its inverse (disparity). Maps whose larger numbers are nearer are inverse
    already, and are learned so."""
    alignment: Literal["none", "scale_shift"] = "none"
    """depth: measure predictions as they are, or after the scale and shift for each image that fit its map best in
    least squares (Ranftl et al. 2022): the only fair way for maps without metres."""
    min_depth: float = 1e-3
    """depth: smallest depth in metres, or in units of a map without metres. Nearer pixels count nowhere, and nothing
    nearer is predicted."""
    max_depth: float = 0.0
    """depth: largest depth; 0 = no limit. Farther pixels count nowhere, and nothing farther is predicted. NYUv2: 10."""
    region: Literal["whole", "eigen"] = "whole"
    """depth: pixels that are measured. whole: every valid one, as in MultiMAE's code. eigen: rows 45 to 471 and columns
    41 to 601 of 480 x 640 (Eigen et al. 2014), in proportion for other sizes."""
    threshold: Literal["image", "batch"] = "image"
    """depth: the reverse Huber loss is linear up to a fifth of the largest error of each image, or of the global batch
    (MultiMAE's code takes each rank's batch). batch takes one more forward pass, unless one rank holds the batch in one
    micro-batch."""
    depth_mean: float = 0.0
    """depth: the head predicts target = depth_mean + depth_deviation x output. The data set it if depth_deviation is
    0."""
    depth_deviation: float = 0.0
    """depth: unit of the head's output; 0 = mean and deviation of up to 256 training maps."""
