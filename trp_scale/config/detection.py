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
    """Folder of the images of --data.path; empty = looked for beside a COCO file (images/, ../NAME for
    annotations/instances_NAME.json, the file's own folder), and JPEGImages for Pascal VOC."""
    test_images: str = ""
    """The same of --downstream.test_path."""
    masks: Literal["auto", "on", "off"] = "auto"
    """Whether masks are learned and measured (Mask R-CNN), or boxes alone (Faster R-CNN). auto: masks where every
    object has one, of the measured data too; the data then sets on or off."""
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
    """Proposals of an image after suppression while training; twice as many of each level before it."""
    test_proposals: int = 1000
    """Proposals of an image while measuring, of each level before suppression and of all after it."""
    rpn_samples: int = 256
    """Anchors of an image that the proposal losses are computed on, half of them on objects if there are as many."""
    box_samples: int = 512
    """Proposals of an image that the losses of boxes are computed on, a quarter on objects if there are as many."""
    score_threshold: float = 0.05
    """Detections with a lower score are dropped."""
    suppression_threshold: float = 0.5
    """Of two detections of one class that overlap by more, the one with the lower score is dropped."""
    detections: int = 100
    """Most detections of an image."""
    max_objects: int = 100
    """Most objects of a training image; further ones are left out, which is said at the start."""
    mask_size: int = 112
    """Side of the grid on which a training object's mask is kept, within its box."""
    min_scale: float = 1.0
    """Large-scale jitter (Ghiasi et al. 2021): the longer side is scaled to crops.size times a number drawn from
    min_scale to max_scale; what is too large is cut, what is missing filled (ViTDet: 0.1 to 2)."""
    max_scale: float = 1.0
    """See min_scale."""
    without_objects: Literal["left_out", "kept"] = "left_out"
    """Training images without an object that counts; all are measured."""
