"""Cascade of box heads (Cai and Vasconcelos 2018), built on torchvision's heads, which have one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

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
