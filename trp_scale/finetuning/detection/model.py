"""Mask, Faster or Cascade R-CNN on a plain vision transformer: torchvision's heads on a feature pyramid, and a cascade
of box heads (Cai and Vasconcelos 2018); torchvision's have one stage."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, clip_boxes_to_image, roi_align

from trp_scale.finetuning.dense.model import as_map, quarters, rescale
from trp_scale.finetuning.detection.settings import DetectionConfig, DetectionTaskConfig
from trp_scale.models.initialise import initial_tensor, initialise_vision, set_all
from trp_scale.models.vit import ImageEncoder, OnImageEncoder

LEVELS = ("0", "1", "2", "3")
"""torchvision's names of the maps of strides p/4, p/2, p and 2p; "pool" has stride 4p."""


class SimplePyramid(nn.Module):
    """Computes all levels from the last block's map (Li et al. 2022, section 3): rescaling, then a 1 x 1 and a 3 x 3
    convolution, each with a norm over channels. `width` is D of tokens."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.rescale, self.output = nn.ModuleList(), nn.ModuleList()
        for level in range(len(LEVELS)):
            module, in_channels = rescale(width, level, LayerNorm2d, shrink=2)
            self.rescale.append(module)
            self.output.append(
                nn.Sequential(
                    nn.Conv2d(in_channels, channels, 1, bias=False),
                    LayerNorm2d(channels),
                    nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                    LayerNorm2d(channels),
                )
            )

    def block_numbers(self, blocks: int) -> list[int]:
        """Return the numbers of the blocks to read; empty = the encoder's normalised output."""
        return []

    def forward(self, tokens: Sequence[Tensor]) -> OrderedDict[str, Tensor]:
        """Map one tensor of tokens [B, 1 + G^2, D] to maps [B, channels, H, W] by level, from fine to coarse."""
        last = as_map(tokens[0])  # [B, D, G, G]
        maps = [output(scaled(last)) for scaled, output in zip(self.rescale, self.output, strict=True)]
        return with_pool(OrderedDict(zip(LEVELS, maps, strict=True)))


class BlockPyramid(nn.Module):
    """Feature pyramid network on the last block of each quarter of the encoder (Li et al. 2021).

    Norms are over channels, not over the batch as in the paper, so images stay independent of each other.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        scaled = [rescale(width, level, LayerNorm2d, shrink=2) for level in range(len(LEVELS))]
        self.rescale = nn.ModuleList(module for module, _ in scaled)
        self.join = FeaturePyramidNetwork([in_channels for _, in_channels in scaled], channels, norm_layer=LayerNorm2d)

    def block_numbers(self, blocks: int) -> list[int]:
        """Return the numbers of the blocks to read."""
        return list(quarters(blocks))

    def forward(self, tokens: Sequence[Tensor]) -> OrderedDict[str, Tensor]:
        """Map four tensors [B, 1 + G^2, D] to maps [B, channels, H, W] by level, from fine to coarse."""
        maps = [scaled(as_map(last)) for scaled, last in zip(self.rescale, tokens, strict=True)]
        return with_pool(self.join(OrderedDict(zip(LEVELS, maps, strict=True))))


def with_pool(maps: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Convert the maps to float32 and add the level "pool", a subsampled copy of the coarsest map.

    Box coordinates have the maps' dtype; in bf16 they would be off by pixels.
    """
    single = OrderedDict((name, level.float()) for name, level in maps.items())
    single["pool"] = F.max_pool2d(single[LEVELS[-1]], kernel_size=1, stride=2)
    return single


PYRAMIDS: dict[str, type[SimplePyramid] | type[BlockPyramid]] = {"simple": SimplePyramid, "fpn": BlockPyramid}


RATIOS = (0.5, 1.0, 2.0)
"""Aspect ratios of the anchors, height / width."""


class SingleProposalHead(RPNHead):  # type: ignore[misc]
    """Returns float32, since box coordinates have the dtype of these outputs."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [level.float() for level in logits], [level.float() for level in deltas]


class SinglePredictor(FastRCNNPredictor):  # type: ignore[misc]
    """Returns float32, as `SingleProposalHead`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores.float(), deltas.float()


class SharedBoxPredictor(SinglePredictor):
    """Predicts one box for all classes, returned for each of them: 4 C deltas, as torchvision's functions expect."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.bbox_pred = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(x)
        return scores, deltas.repeat(1, scores.shape[-1])


STAGE_IOUS = (0.5, 0.6, 0.7)
"""IoU with an object from which a box is a sample of its class, by stage."""

Maps = dict[str, Tensor]
Sizes = list[tuple[int, int]]
Target = dict[str, Tensor]


class CascadeHeads(nn.Module):
    """Stages of box heads; the boxes of each stage are the proposals of the next. Only the first stage samples.

    As in ViTDet, losses are summed over the stages, and the pyramid gets their mean gradient. Scores are means over the
    stages, boxes those of the last. The mask head belongs to the first stage: it learns from the sampled proposals, and
    predicts in the last boxes. A box that shrinks to nothing stays a sample, without an object.

    Args:
        stages: heads with predictors that return the same box for all classes.
    """

    def __init__(self, stages: Sequence[RoIHeads]) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList(stages)  # torchvision has no types

    def forward(
        self, features: Maps, proposals: list[Tensor], sizes: Sizes, targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """Return losses if targets are given, else detections, as torchvision's RoIHeads: (detections, losses)."""
        if targets is None:
            return self._detect(features, proposals, sizes), {}
        return [], self._losses(features, proposals, sizes, targets)

    def _losses(
        self, features: Maps, proposals: list[Tensor], sizes: Sizes, targets: list[Target]
    ) -> dict[str, Tensor]:
        first = self.stages[0]
        samples, matches, labels, offsets = first.select_training_samples(proposals, targets)
        boxes, classes_of_boxes, stage_losses = samples, labels, []
        for stage in self.stages:
            if stage is not first:
                classes_of_boxes, offsets = match_boxes(stage, boxes, targets)
            logits, deltas = self._predict(stage, features, boxes, sizes)
            stage_losses.append(torch.stack(fastrcnn_loss(logits, deltas, classes_of_boxes, offsets)))
            boxes = refine(stage, deltas, boxes, sizes)
        classes, regression = torch.stack(stage_losses).sum(0)
        losses = {"loss_classifier": classes, "loss_box_reg": regression}
        if first.has_mask():
            inside = [image > 0 for image in labels]
            positives = [image[chosen] for image, chosen in zip(samples, inside, strict=True)]
            losses["loss_mask"] = maskrcnn_loss(
                self._mask_logits(features, positives, sizes),
                positives,
                [target["masks"] for target in targets],
                [target["labels"] for target in targets],
                [image[chosen] for image, chosen in zip(matches, inside, strict=True)],
            )
        return losses

    def _detect(self, features: Maps, boxes: list[Tensor], sizes: Sizes) -> list[Target]:
        scores = []
        for stage in self.stages:
            proposals = boxes
            logits, deltas = self._predict(stage, features, proposals, sizes)
            scores.append(logits.softmax(-1))  # [N, 1 + C]
            boxes = refine(stage, deltas, proposals, sizes)
        logits = torch.stack(scores).mean(0).log()  # postprocess_detections applies the softmax
        boxes, values, labels = stage.postprocess_detections(logits, deltas, proposals, sizes)
        detections = [
            {"boxes": box, "labels": label, "scores": value}
            for box, label, value in zip(boxes, labels, values, strict=True)
        ]
        if self.stages[0].has_mask():
            logits = self._mask_logits(features, boxes, sizes)
            for detection, masks in zip(detections, maskrcnn_inference(logits, labels), strict=True):
                detection["masks"] = masks
        return detections

    def _predict(self, stage: RoIHeads, features: Maps, boxes: list[Tensor], sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Return class logits [N, 1 + C] and deltas [N, 4 (1 + C)] of the boxes of all images."""
        pooled = stage.box_roi_pool(features, boxes, sizes)  # [N, channels, 7, 7]
        if pooled.requires_grad:
            pooled.register_hook(lambda gradient: gradient / len(self.stages))
        logits, deltas = stage.box_predictor(stage.box_head(pooled))
        return logits, deltas

    def _mask_logits(self, features: Maps, boxes: list[Tensor], sizes: Sizes) -> Tensor:
        first = self.stages[0]
        logits: Tensor = first.mask_predictor(first.mask_head(first.mask_roi_pool(features, boxes, sizes)))
        return logits


@torch.no_grad()
def refine(stage: RoIHeads, deltas: Tensor, boxes: list[Tensor], sizes: Sizes) -> list[Tensor]:
    """Return the boxes [n, 4] of each image after a stage, clipped to the image, without gradients.

    Args:
        deltas: [N, 4 (1 + C)], equal for all classes, of all images.
    """
    refined = stage.box_coder.decode(deltas[:, :4], boxes)[:, 0]  # [N, 4]
    of_images = refined.split([len(image) for image in boxes])
    return [clip_boxes_to_image(image, size) for image, size in zip(of_images, sizes, strict=True)]


@torch.no_grad()
def match_boxes(stage: RoIHeads, boxes: list[Tensor], targets: list[Target]) -> tuple[list[Tensor], list[Tensor]]:
    """Match boxes with objects by the threshold of a stage; return labels [n] and box offsets [n, 4] of each image.

    Label 0 is background; offsets matter for other labels only.
    """
    objects = [target["boxes"].to(boxes[0].dtype) for target in targets]
    matches, labels = stage.assign_targets_to_proposals(boxes, objects, [target["labels"] for target in targets])
    # An image without objects matches a box of zeros.
    padded = [image if len(image) else image.new_zeros(1, 4) for image in objects]
    matched = [image[numbers] for image, numbers in zip(padded, matches, strict=True)]
    return labels, stage.box_coder.encode(matched, boxes)


class Detector(OnImageEncoder):
    """Proposals from all levels of the pyramid, then classes, boxes and masks of the proposals (He et al. 2017).

    Images are normalised squares, so torchvision's transform is not used. Anchor sizes and the levels of proposals are
    proportional to the encoder's stride p, with torchvision's values at p = 16: anchors of 32 to 512 pixels, and a
    proposal of 224 pixels on the map of stride 16. `downstream.classes` excludes the background.
    """

    def __init__(self, config: DetectionTaskConfig) -> None:
        super().__init__()
        detection, patch_size = config.detection, config.vision.patch_size
        whole = detection.whole_blocks or quarters(config.model.layers)
        self.encoder = ImageEncoder(config, window=detection.window, whole=whole)
        self.pyramid = PYRAMIDS[detection.pyramid](config.model.hidden_size, detection.width)
        anchors = tuple((2 * patch_size * 2**level,) for level in range(len(LEVELS) + 1))
        train, test = detection.train_proposals, detection.test_proposals
        self.rpn = RegionProposalNetwork(
            AnchorGenerator(anchors, (RATIOS,) * len(anchors)),
            SingleProposalHead(detection.width, len(RATIOS), conv_depth=detection.rpn_convolutions),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=detection.rpn_samples,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * train, "testing": test},
            post_nms_top_n={"training": train, "testing": test},
            nms_thresh=0.7,
        )
        self.roi_heads = build_heads(detection, patch_size, 1 + config.downstream.classes)
        self._after = self.pyramid.block_numbers(config.model.layers)
        initialise_vision(self.encoder, seed=config.training.seed, std=config.model.initializer_range)
        for name in ("pyramid", "rpn", "roi_heads"):
            _initialise(getattr(self, name), f"{name}.", config.training.seed)

    def forward(self, images: Tensor, targets: list[Target] | None = None) -> dict[str, Tensor] | list[Target]:
        """Return losses if targets are given, else detections, in training and evaluation mode.

        torch's generator samples the proposals of the losses.

        Args:
            images: [B, 3, S, S] normalised pixels.
            targets: for each image boxes [n, 4] in pixels, labels [n] from 1, and masks [n, S, S] 0 or 1 if masks are
                learned.

        Returns:
            Mean losses of the batch by torchvision's names; or for each image boxes [n, 4], labels [n], descending
            scores [n], and masks [n, 1, 28, 28], probabilities within the box.
        """
        for part in (self.rpn, self.roi_heads):  # the mode only selects losses or detections: no dropout, no statistics
            part.train(targets is not None)
        dtype = self.encoder.cls_token.dtype  # DeepSpeed's weights may have 16 bits; the pyramid's levels are float32
        half = dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(images.device.type, dtype) if half else nullcontext():
            levels = self.pyramid(self.encoder(images, self._after))
            sizes = [(images.shape[-2], images.shape[-1])] * len(images)
            proposals, proposal_losses = self.rpn(ImageList(images, sizes), levels, targets)
            detections, losses = self.roi_heads(levels, proposals, sizes, targets)
        return detections if targets is None else {**proposal_losses, **losses}


def build_heads(detection: DetectionConfig, patch_size: int, classes: int) -> RoIHeads | CascadeHeads:
    """Build the heads; `classes` includes the background."""
    if detection.heads == "one_stage":
        return _stage(detection, patch_size, SinglePredictor(detection.box_width, classes))
    return CascadeHeads(
        [
            _stage(detection, patch_size, SharedBoxPredictor(detection.box_width, classes), number, iou)
            for number, iou in enumerate(STAGE_IOUS)
        ]
    )


def _stage(
    detection: DetectionConfig, patch_size: int, predictor: SinglePredictor, number: int = 0, iou: float = 0.5
) -> RoIHeads:
    """Build a stage of the heads; masks belong to the first. Deltas are in finer units in each stage."""
    width = detection.width
    # torchvision's rule maps a scale of 224 pixels to level 4, which has stride 16.
    align = partial(
        MultiScaleRoIAlign,
        list(LEVELS),
        sampling_ratio=2,
        canonical_scale=14 * patch_size,
        canonical_level=int(math.log2(patch_size)),
    )
    masks: dict[str, nn.Module] = {}
    if detection.masks == "on" and number == 0:
        classes = predictor.cls_score.out_features
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
        predictor,
        fg_iou_thresh=iou,
        bg_iou_thresh=iou,
        batch_size_per_image=detection.box_samples,
        positive_fraction=0.25,
        bbox_reg_weights=tuple((1 + number) * unit for unit in (10.0, 10.0, 5.0, 5.0)),
        score_thresh=detection.score_threshold,
        nms_thresh=detection.suppression_threshold,
        detections_per_img=detection.detections,
        **masks,
    )


SMALL = {"rpn.": 0.01, ".box_predictor.cls_score.": 0.01, ".box_predictor.bbox_pred.": 0.001}
"""Standard deviation of initial weights by part of the name (Girshick 2015; Ren et al. 2015)."""


def _initialise(module: nn.Module, prefix: str, seed: int) -> None:
    """Initialise matrices and kernels from a normal distribution, with the deviations above, else sqrt(2 / inputs) (He
    et al. 2015); biases 0, norm weights 1."""
    transposed = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.ConvTranspose2d)}

    def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
        if parameter.ndim < 2:
            return 1.0 if name.endswith(".weight") else 0.0
        whole = prefix + name
        # Stride = kernel size: each output pixel of a transposed convolution uses a single kernel position.
        inputs = parameter.shape[0] if name in transposed else parameter[0].numel()
        small = [std for part, std in SMALL.items() if part in whole]
        return initial_tensor(seed, whole, tuple(parameter.shape), small[0] if small else math.sqrt(2.0 / inputs))

    set_all(module, rule)


@torch.no_grad()
def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks of boxes into the image with bilinear interpolation; 0 outside the boxes.

    torchvision's paste_masks_in_image enlarges a mask by up to a pixel on each side, much for a small object.

    Args:
        masks: [n, m, m] from 0 to 1.
        boxes: [n, 4] left, top, right, bottom in pixels.
        size: height and width H, W of the image.

    Returns:
        [n, H, W] float32 from 0 to 1.
    """
    height, width = size
    ringed = nn.functional.pad(masks.float(), (1, 1, 1, 1))[:, None]  # [n, 1, m + 2, m + 2]
    corners = torch.tensor([0.0, 0.0, width, height], device=boxes.device)
    begin, end = boxes[:, :2].float().repeat(1, 2), boxes[:, 2:].float().repeat(1, 2)  # [n, 4]
    image = (corners - begin) / (end - begin) * masks.shape[-1] + 1.0  # the image's corners, in cells of each mask
    numbers = torch.arange(len(masks), device=boxes.device, dtype=image.dtype)[:, None]
    rows = torch.cat([numbers, image], dim=1)  # [n, 5]
    pasted: Tensor = roi_align(ringed, rows, size, sampling_ratio=1, aligned=True)  # [n, 1, H, W]
    return pasted[:, 0]
