"""Mask R-CNN, or Faster R-CNN, on an image encoder: torchvision's heads on a pyramid of ours."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign, roi_align

from trp_scale.config.detection import DetectionConfig
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.downstream.detection.feature_pyramid import LEVELS, PYRAMIDS
from trp_scale.models.image_encoder import ImageEncoder, OnImageEncoder
from trp_scale.models.initialise import initial_tensor, initialise_vision, write

RATIOS = (0.5, 1.0, 2.0)
"""Height over width of the anchors."""

Target = dict[str, Tensor]


class SingleProposalHead(RPNHead):  # type: ignore[misc]
    """Outputs in single precision: box coordinates take their type."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [one.float() for one in logits], [one.float() for one in deltas]


class SinglePredictor(FastRCNNPredictor):  # type: ignore[misc]
    """Outputs in single precision, as above."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores.float(), deltas.float()


class Detector(OnImageEncoder):
    """Proposals from all levels of the pyramid, then classes, boxes and masks of the proposals (He et al. 2017).

    Pixels come normalised and in squares, so torchvision's own transform has no part in it. Sizes of anchors and the
    level of a proposal keep torchvision's proportion to the stride p of the encoder: for p = 16 anchors of 32 to 512
    pixels, and a proposal of 224 pixels on the map of stride 16.

    Args:
        config: sizes, the section `detection` with masks on or off, `downstream.classes` without the background, and
            the seed of the initial weights.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__()
        detection, patch_size = config.detection, config.vision.patch_size
        self.encoder = ImageEncoder(config)
        self.pyramid = PYRAMIDS[detection.pyramid](config.model.hidden_size, detection.width)
        self.rpn = _proposals(detection, patch_size)
        self.roi_heads = _heads(detection, patch_size, 1 + config.downstream.classes)
        self._after = self.pyramid.reads(config.model.layers)
        initialise_vision(self.encoder, seed=config.training.seed, std=config.model.initializer_range)
        for name in ("pyramid", "rpn", "roi_heads"):
            _initialise(getattr(self, name), f"{name}.", config.training.seed)

    def forward(self, images: Tensor, targets: list[Target] | None = None) -> dict[str, Tensor] | list[Target]:
        """Losses where targets are given, detections where not, whatever mode the module is in.

        The samples that the losses are computed on are drawn by torch's generator.

        Args:
            images: [B, 3, S, S] normalised pixels.
            targets: of each image boxes [n, 4] in pixels, labels [n] from 1, and masks [n, S, S] 0 or 1 if masks are
                learned.

        Returns:
            The means over the batch's samples by torchvision's names, or of each image boxes [n, 4], labels [n], scores
            [n] descending, and masks [n, 1, 28, 28], probabilities within the box.
        """
        for part in (self.rpn, self.roi_heads):  # they have neither dropout nor statistics: their mode only says this
            part.train(targets is not None)
        with self._own_precision(images.device):
            levels = self.pyramid(self.encoder(images, self._after))
            sizes = [(images.shape[-2], images.shape[-1])] * len(images)
            proposals, proposal_losses = self.rpn(ImageList(images, sizes), levels, targets)
            detections, losses = self.roi_heads(levels, proposals, sizes, targets)
        return detections if targets is None else {**proposal_losses, **losses}

    def _own_precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Weights of 16 bits (DeepSpeed's) meet levels in single precision, which autocast joins."""
        dtype = self.encoder.cls_token.dtype
        if dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(device.type, dtype)
        return nullcontext()


def _proposals(detection: DetectionConfig, patch_size: int) -> RegionProposalNetwork:
    sizes = tuple((2 * patch_size * 2**level,) for level in range(len(LEVELS) + 1))
    anchors = AnchorGenerator(sizes, (RATIOS,) * len(sizes))
    train, test = detection.train_proposals, detection.test_proposals
    return RegionProposalNetwork(
        anchors,
        SingleProposalHead(detection.width, len(RATIOS), conv_depth=detection.rpn_convolutions),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=detection.rpn_samples,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * train, "testing": test},
        post_nms_top_n={"training": train, "testing": test},
        nms_thresh=0.7,
    )


def _heads(detection: DetectionConfig, patch_size: int, classes: int) -> RoIHeads:
    """`classes` with the background."""
    width = detection.width
    # torchvision's rule is stated for level 4, of stride 16, and a scale of 224 pixels there.
    align = partial(
        MultiScaleRoIAlign,
        list(LEVELS),
        sampling_ratio=2,
        canonical_scale=14 * patch_size,
        canonical_level=int(math.log2(patch_size)),
    )
    masks: dict[str, nn.Module] = {}
    if detection.masks == "on":
        masks = {
            "mask_roi_pool": align(output_size=14),
            "mask_head": MaskRCNNHeads(width, (width,) * 4, 1, norm_layer=LayerNorm2d),
            "mask_predictor": MaskRCNNPredictor(width, width, classes),
        }
    if detection.box_head == "2fc":
        head: nn.Module = TwoMLPHead(width * 7**2, detection.box_width)
    else:
        head = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [detection.box_width], norm_layer=LayerNorm2d)
    return RoIHeads(
        align(output_size=7),
        head,
        SinglePredictor(detection.box_width, classes),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=detection.box_samples,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=detection.score_threshold,
        nms_thresh=detection.suppression_threshold,
        detections_per_img=detection.detections,
        **masks,
    )


SMALL = {"rpn.": 0.01, "roi_heads.box_predictor.cls_score.": 0.01, "roi_heads.box_predictor.bbox_pred.": 0.001}
"""Standard deviation of the weights of outputs, by the beginning of their names (Girshick 2015; Ren et al. 2015)."""


def _initialise(module: nn.Module, prefix: str, seed: int) -> None:
    """Matrices and kernels normal: those above with a small deviation, the others with sqrt(2 / inputs) (He et al.
    2015); biases 0, norm weights 1."""
    transposed = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.ConvTranspose2d)}

    def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
        if parameter.ndim < 2:
            return 1.0 if name.endswith(".weight") else 0.0
        whole = prefix + name
        # Of a transposed convolution whose stride is its side every output pixel has one place of the kernel.
        inputs = parameter.shape[0] if name in transposed else parameter[0].numel()
        small = [std for begin, std in SMALL.items() if whole.startswith(begin)]
        return initial_tensor(seed, whole, tuple(parameter.shape), small[0] if small else math.sqrt(2.0 / inputs))

    write(module, rule)


@torch.no_grad()
def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks within their boxes -> masks of the whole image, interpolated bilinearly; 0 outside the boxes.

    Args:
        masks: [n, m, m] from 0 to 1.
        boxes: [n, 4] left, top, right, bottom in pixels.
        size: height and width H, W of the image.

    Returns:
        [n, H, W] float32 from 0 to 1. torchvision's own paste widens a mask by up to a pixel on each side, much of a
        small object.
    """
    height, width = size
    ringed = nn.functional.pad(masks.float(), (1, 1, 1, 1))[:, None]  # [n, 1, m + 2, m + 2]
    corners = torch.tensor([0.0, 0.0, width, height], device=boxes.device)
    begin, end = boxes[:, :2].float().repeat(1, 2), boxes[:, 2:].float().repeat(1, 2)  # [n, 4]
    image = (corners - begin) / (end - begin) * masks.shape[-1] + 1.0  # the image's corners, in cells of each mask
    numbers = torch.arange(len(masks), device=boxes.device, dtype=image.dtype)[:, None]
    rows = torch.cat([numbers, image], dim=1)  # [n, 5]
    found: Tensor = roi_align(ringed, rows, size, sampling_ratio=1, aligned=True)  # [n, 1, H, W]
    return found[:, 0]
