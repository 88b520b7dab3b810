"""Fine-tuning on boxes and masks of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class DetectionConfig:
    """Mask R-CNN on a vision transformer. Images are scaled into squares of crops.size; crops.flip mirrors them, and
    crops.interpolation says how they are resized. Anchors and levels follow from the patch size p: strides p/4, p/2, p,
    2p and 4p, with anchors of 8 strides."""

    images: str = ""
    """Folder with the images of --data.path. Empty: for a COCO file images/ beside it, ../NAME for
    annotations/instances_NAME.json, or its own folder; for Pascal VOC JPEGImages."""
    test_images: str = ""
    """Folder with the images of --downstream.test_path, as `images`."""
    masks: Literal["auto", "on", "off"] = "auto"
    """on: masks and boxes (Mask R-CNN). off: boxes alone (Faster R-CNN). auto: on if every object has a mask, in the
    measured data too."""
    pyramid: Literal["simple", "fpn"] = "simple"
    """simple: all levels from the last block's tokens (Li et al. 2022, ViTDet). fpn: a level from every fourth of the
    blocks, joined from the top down (Li et al. 2021, which MAE and AdPE follow)."""
    width: int = 256
    """Channels of the pyramid, and of the convolutions of all heads."""
    box_head: Literal["4conv_1fc", "2fc"] = "4conv_1fc"
    """Four convolutions and a linear layer (ViTDet, Li et al. 2021), or two linear layers (He et al. 2017)."""
    box_width: int = 1024
    """Width of the box head's linear layers."""
    rpn_convolutions: int = 2
    """Convolutions of the proposal head before its outputs (ViTDet: 2, He et al. 2017: 1)."""
    train_proposals: int = 1000
    """Training: proposals of an image after suppression. Before it, twice as many from each level."""
    test_proposals: int = 1000
    """Measuring: proposals from each level before suppression, and of an image after it."""
    rpn_samples: int = 256
    """Anchors of an image that the proposal losses are computed on. Up to half of them are on objects."""
    box_samples: int = 512
    """Proposals of an image that the box losses are computed on. Up to a quarter of them are on objects."""
    score_threshold: float = 0.05
    """Detections with a lower score are dropped."""
    suppression_threshold: float = 0.5
    """Largest overlap of two detections of one class. Beyond it the one with the lower score is dropped."""
    detections: int = 100
    """Most detections of an image."""
    max_objects: int = 100
    """Most objects of a training image. Further ones are left out, with a notice at the start."""
    mask_size: int = 112
    """Side of the grid on which a training object's mask is kept, within its box."""
    min_scale: float = 1.0
    """Large-scale jitter (Ghiasi et al. 2021): the longer side is scaled to crops.size times a number between min_scale
    and max_scale. The image is then cut or padded to the square (ViTDet: 0.1 to 2)."""
    max_scale: float = 1.0
    """See min_scale."""
    without_objects: Literal["left_out", "kept"] = "left_out"
    """Training images without an object that counts are left out, or kept. Measured images are always kept."""
