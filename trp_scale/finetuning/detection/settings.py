"""Settings of object detection and instance segmentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trp_scale.config.finetuning import ImageDownstreamConfig, ImageTaskConfig
from trp_scale.config.registry import Section, component, setting


@dataclass(kw_only=True)
class DetectionDownstreamConfig(ImageDownstreamConfig):
    """Task, length of the run and measured images."""

    kind: Literal["detection"] = "detection"
    """Boxes and masks of objects."""


@dataclass(kw_only=True)
class DetectionConfig(Section):
    """Mask R-CNN on a vision transformer. Images are resized (crops.interpolation) into squares of crops.size, and
    flipped (crops.flip). For patch size p the pyramid has strides p/4, p/2, p, 2p and 4p, with anchors of 8 strides."""

    images: str = ""
    """Folder with the images of --data.path. Empty: for Pascal VOC JPEGImages; for annotations/instances_NAME.json of
    COCO the first of images, ../NAME, NAME and the file's folder that has the first image."""
    test_images: str = ""
    """Folder with the images of --downstream.test_path, as `images`."""
    masks: Literal["auto", "on", "off"] = "auto"
    """on: masks and boxes (Mask R-CNN). off: boxes alone (Faster R-CNN). auto: on if every object has a mask, in the
    measured data too."""
    pyramid: Literal["simple", "fpn"] = "simple"
    """simple: all levels from the last block's tokens (Li et al. 2022, ViTDet). fpn: a feature pyramid network on the
    last block of each quarter (Li et al. 2021, as MAE and AdPE)."""
    window: int = setting(0, at_least=0)
    """Patches along the sides of attention windows, padded at right and bottom (ViTDet: 14). The class token attends
    within each, and its mean is kept. 0 = every block attends to the whole image."""
    whole_blocks: list[int] = field(default_factory=list)
    """window: blocks, from 0, that attend to the whole image; empty = the last block of each quarter (ViTDet)."""
    heads: Literal["one_stage", "cascade"] = "one_stage"
    """one_stage: Mask or Faster R-CNN. cascade: three stages of boxes shared by all classes, for IoU 0.5, 0.6 and 0.7
    (Cai and Vasconcelos 2018, as ViTDet)."""
    width: int = setting(256, at_least=1)
    """Channels of the pyramid, and of the convolutions of all heads."""
    box_head: Literal["4conv_1fc", "2fc"] = "4conv_1fc"
    """Four convolutions and a linear layer (ViTDet, Li et al. 2021), or two linear layers (He et al. 2017)."""
    box_width: int = setting(1024, at_least=1)
    """Width of the box head's linear layers."""
    rpn_convolutions: int = setting(2, at_least=1)
    """Convolutions of the proposal head before its outputs (ViTDet: 2, He et al. 2017: 1)."""
    train_proposals: int = setting(1000, at_least=1)
    """Training: proposals of an image after suppression. Before it, twice as many from each level."""
    test_proposals: int = setting(1000, at_least=1)
    """Measuring: proposals from each level before suppression, and of an image after it."""
    rpn_samples: int = setting(256, at_least=1)
    """Anchors of an image that the proposal losses are computed on. Up to half of them are on objects."""
    box_samples: int = setting(512, at_least=1)
    """Proposals of an image that the box losses are computed on. Up to a quarter of them are on objects."""
    score_threshold: float = setting(0.05, at_least=0, at_most=1)
    """Smallest score of a detection."""
    suppression_threshold: float = setting(0.5, at_least=0, at_most=1)
    """IoU threshold of non-maximum suppression between detections of one class."""
    detections: int = setting(100, at_least=1)
    """Most detections of an image."""
    max_objects: int = setting(100, at_least=1)
    """Most objects of a training image. Further ones are left out, with a notice at the start."""
    mask_size: int = setting(112, at_least=2, at_most=1024)
    """Resolution of a training object's mask within its box."""
    min_scale: float = 1.0
    """Large-scale jitter (Ghiasi et al. 2021): the longer side is resized to crops.size x a number from min_scale to
    max_scale (ViTDet: 0.1 to 2). The image is then cropped or padded to the square."""
    max_scale: float = 1.0
    """See min_scale."""
    without_objects: Literal["left_out", "kept"] = "left_out"
    """Skip or keep training images without objects. Evaluation keeps all images."""

    def problems(self, config: Any) -> Iterator[str]:
        if config.batch.micro_size == "auto":
            yield "--batch.micro_size is auto, but detection losses depend on it; allowed: a number"
        patch_size, blocks, size = config.vision.patch_size, config.model.layers, config.crops.size
        if not 0 < self.min_scale <= self.max_scale <= 4:
            yield (
                f"--detection.min_scale is {self.min_scale} and --detection.max_scale {self.max_scale}, allowed: more "
                "than 0, at most 4, the first not above the second"
            )
        if patch_size < 4 or patch_size & (patch_size - 1):
            yield (
                f"the encoder's patches have {patch_size} pixels; allowed for detection: a power of two from 4, which "
                "the pyramid halves and doubles"
            )
        elif size % (4 * patch_size):
            near = max(1, size // (4 * patch_size)) * 4 * patch_size
            yield (
                f"--crops.size is {size}, allowed for detection: multiples of four patches, {4 * patch_size} pixels, "
                f"for example {near}"
            )
        whole = self.whole_blocks
        in_range = all(0 <= number < blocks for number in whole)
        if whole and (not self.window or sorted(set(whole)) != whole or not in_range):
            yield (
                f"--detection.whole_blocks is {' '.join(map(str, whole))}, allowed: with --detection.window above 0 "
                f"(it is {self.window}), blocks in ascending order, each once, from 0 to {blocks - 1}"
            )
        elif self.window > 0 and (len(whole) or 4) >= blocks:
            yield (
                f"--detection.window is {self.window}, but none of the {blocks} blocks has windows; "
                f"--detection.whole_blocks is {' '.join(map(str, whole)) or 'empty (the last of each quarter)'}, "
                "allowed: fewer than all blocks"
            )
        if self.pyramid == "fpn" and blocks % 4:
            yield (f"--detection.pyramid fpn needs a multiple of 4 blocks, the encoder has {blocks}; allowed: simple")


@component("task", "detection", "trp_scale.finetuning.detection.task:DetectionTask")
@dataclass(kw_only=True)
class DetectionTaskConfig(ImageTaskConfig):
    """Object detection and instance segmentation (AdPE 5.2; MLO-MAE 3.5.2 and D.1)."""

    downstream: DetectionDownstreamConfig = field(default_factory=DetectionDownstreamConfig)
    detection: DetectionConfig = field(default_factory=DetectionConfig)

    def datasets(self) -> dict[str, str]:
        return {}  # COCO's files, or folders of Pascal VOC
