"""The cascade of box heads against torchvision's heads of one stage, and against short loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image

from tests.unit.finetuning.detection.small_sets import detection_config
from tests.unit.finetuning.detection.test_model import SIDE, some_images, some_targets
from trp_scale.config import OptimizerConfig
from trp_scale.engines.optimizer import build_optimizer
from trp_scale.finetuning.detection.model import CascadeHeads, Detector, match_boxes, refine

SIZES = [(SIDE, SIDE)] * 2


def detector(**settings: Any) -> Detector:
    """With weights of the box predictors that move boxes by pixels."""
    made = Detector(detection_config(heads="cascade", **{"score_threshold": 0.0, **settings}))
    generator = torch.Generator().manual_seed(0)
    for stage in made.roi_heads.stages:
        for name, size in (("bbox_pred", 0.3), ("cls_score", 0.3)):
            weight = getattr(stage.box_predictor, name).weight
            weight.data.copy_(size * torch.randn(weight.shape, generator=generator))
    return made


def some_proposals() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    corners = 40 * torch.rand(2, 30, 2, generator=generator)
    sides = 8 + 16 * torch.rand(2, 30, 2, generator=generator)
    return list(torch.cat([corners, corners + sides], dim=-1))


def levels(model: Detector) -> dict[str, Tensor]:
    with torch.no_grad():
        return model.pyramid(model.encoder(some_images()))


@pytest.mark.parametrize("masks", ["on", "off"])
def test_one_stage_is_torchvisions_head(masks: str) -> None:
    model = detector(masks=masks)
    stage, maps = model.roi_heads.stages[0], levels(model)
    one = CascadeHeads([stage])
    outputs = []
    for heads in (one, stage):
        torch.manual_seed(2)
        outputs.append(heads.train()(maps, some_proposals(), SIZES, some_targets())[1])
        with torch.no_grad():
            outputs.append(heads.eval()(maps, some_proposals(), SIZES)[0])
    losses, detections, their_losses, theirs = outputs
    assert losses.keys() == their_losses.keys() and len(losses) == (3 if masks == "on" else 2)
    assert all(torch.equal(losses[name], their_losses[name]) for name in losses)
    for ours, other in zip(detections, theirs, strict=True):
        assert ours.keys() == other.keys() and len(ours["boxes"]) == 100
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_thresholds_and_weights_of_boxes_grow_with_the_stage() -> None:
    stages = detector().roi_heads.stages
    assert [stage.box_coder.weights for stage in stages] == [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]
    assert [stage.has_mask() for stage in stages] == [True, False, False]
    assert [stage.box_predictor.bbox_pred.out_features for stage in stages] == [4, 4, 4]
    scales = [stage.fg_bg_sampler.batch_size_per_image for stage in stages]
    assert scales == [16, 16, 16]
    object_, shifts = torch.tensor([[10.0, 10.0, 30.0, 30.0]]), torch.arange(0.0, 12.0, 0.5)
    boxes = object_ + shifts[:, None] * torch.tensor([1.0, 0.0, 1.0, 0.0])
    targets = [{"boxes": object_, "labels": torch.tensor([5])}]
    for stage, threshold in zip(stages, (0.5, 0.6, 0.7), strict=True):
        overlap = (20 - shifts).clamp(min=0) / (20 + shifts)
        (labels,), (offsets,) = match_boxes(stage, [boxes], targets)
        assert labels.tolist() == [5 if share >= threshold else 0 for share in overlap.tolist()]
        weight = stage.box_coder.weights[0]
        torch.testing.assert_close(offsets[:, 0], -shifts / 20 * weight)
        (labels,), _ = match_boxes(stage, [boxes], [{"boxes": object_[:0], "labels": torch.empty(0).long()}])
        assert not labels.any()


def loop(model: Detector, proposals: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Mean scores, last boxes and the boxes of each stage, image by image without torchvision's heads."""
    maps, heads = levels(model), model.roi_heads.stages
    scores, boxes, history = [], [], []
    for number, initial in enumerate(proposals):
        box, sums, path = initial, torch.zeros(len(initial), 9), [initial]
        one = {name: level[number : number + 1] for name, level in maps.items()}
        for stage, unit in zip(heads, (1, 2, 3), strict=True):
            features = stage.box_head(stage.box_roi_pool(one, [box], [(SIDE, SIDE)]))
            sums += F.linear(features, *stage.box_predictor.cls_score.parameters()).softmax(-1)
            deltas = F.linear(features, *stage.box_predictor.bbox_pred.parameters())
            coder = BoxCoder((10.0 * unit, 10.0 * unit, 5.0 * unit, 5.0 * unit))
            box = clip_boxes_to_image(coder.decode_single(deltas, box), (SIDE, SIDE))
            path.append(box)
        scores.append(sums / 3)
        boxes.append(box)
        history.append(path)
    return scores, boxes, history


@torch.no_grad()
def test_detections_have_mean_scores_and_the_last_boxes() -> None:
    model = detector(masks="off", detections=1000)
    scores, boxes, _ = loop(model, some_proposals())
    detections = model.roi_heads.eval()(levels(model), some_proposals(), SIZES)[0]
    for found, score, box in zip(detections, scores, boxes, strict=True):
        assert (box - some_proposals()[0]).abs().max() > 1
        rows = box[:, None].expand(-1, 8, -1).reshape(-1, 4)
        labels = torch.arange(1, 9).repeat(len(box))
        kept = batched_nms(rows, score[:, 1:].flatten(), labels, 0.5)
        torch.testing.assert_close(found["scores"], score[:, 1:].flatten()[kept], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["boxes"], rows[kept], rtol=1e-4, atol=1e-3)
        assert torch.equal(found["labels"], labels[kept])


@torch.no_grad()
def test_losses_are_sums_over_stages_of_boxes_that_move() -> None:
    """With all proposals sampled: cross-entropy of all boxes, smooth L1 of those on objects over the number of all."""
    model = detector(masks="off", box_samples=1000)
    targets, maps = some_targets(), levels(model)
    model.roi_heads.stages[0].fg_bg_sampler.positive_fraction = 1.0
    torch.manual_seed(3)
    losses = model.roi_heads.train()(maps, some_proposals(), SIZES, targets)[1]
    proposals = [torch.cat([rows, target["boxes"]]) for rows, target in zip(some_proposals(), targets, strict=True)]
    _, _, history = loop(model, proposals)
    classes, regression, positives = 0.0, 0.0, []
    for number, (stage, threshold) in enumerate(zip(model.roi_heads.stages, (0.5, 0.6, 0.7), strict=True)):
        starts = [path[number] for path in history]
        features = stage.box_head(stage.box_roi_pool(maps, starts, SIZES))
        logits = F.linear(features, *stage.box_predictor.cls_score.parameters())
        deltas = F.linear(features, *stage.box_predictor.bbox_pred.parameters())
        labels, offsets = [], []
        for start, target in zip(starts, targets, strict=True):
            overlap, nearest = box_iou(start, target["boxes"]).max(1)
            labels.append(torch.where(overlap >= threshold, target["labels"][nearest], 0))
            wide, high = start[:, 2] - start[:, 0], start[:, 3] - start[:, 1]
            aims = target["boxes"][nearest]
            aim_wide, aim_high = aims[:, 2] - aims[:, 0], aims[:, 3] - aims[:, 1]
            centres = [(aims[:, i] + aims[:, i + 2] - start[:, i] - start[:, i + 2]) / 2 for i in (0, 1)]
            ratios = [centres[0] / wide, centres[1] / high, (aim_wide / wide).log(), (aim_high / high).log()]
            offsets.append(torch.stack(ratios, dim=1) * torch.tensor([10.0, 10.0, 5.0, 5.0]) * (1 + number))
        label, offset = torch.cat(labels), torch.cat(offsets)
        on = label > 0
        positives.append(int(on.sum()))
        classes += float(F.cross_entropy(logits, label))
        regression += float(F.smooth_l1_loss(deltas[on], offset[on], beta=1 / 9, reduction="sum")) / len(label)
    assert all(positives)
    assert float(losses["loss_classifier"]) == pytest.approx(classes, rel=1e-4)
    assert float(losses["loss_box_reg"]) == pytest.approx(regression, rel=1e-4)


def test_the_pyramid_gets_the_mean_gradient_of_the_stages_and_boxes_none() -> None:
    model = detector(masks="off")
    stages, proposals = model.roi_heads.stages, some_proposals()

    def gradients(heads: CascadeHeads) -> tuple[Tensor, Tensor]:
        maps = {name: level.requires_grad_() for name, level in levels(model).items()}
        model.zero_grad()
        torch.manual_seed(4)
        losses = heads.train()(maps, proposals, SIZES, some_targets())[1]
        sum(losses.values()).backward()  # type: ignore[union-attr]
        weight = heads.stages[0].box_predictor.bbox_pred.weight.grad
        assert maps["0"].grad is not None and weight is not None
        return maps["0"].grad, weight.clone()

    alone_pyramid, alone_weight = gradients(CascadeHeads(stages[:1]))
    for stage in stages[1:]:  # later stages without a gradient
        stage.box_predictor.cls_score.weight.data.zero_()
        stage.box_predictor.bbox_pred.weight.data.zero_()
    pyramid, weight = gradients(CascadeHeads(stages))
    torch.testing.assert_close(weight, alone_weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(pyramid, alone_pyramid / 3, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("objects", [True, False])
def test_every_parameter_has_a_gradient_even_without_objects(objects: bool) -> None:
    model = detector(window=3, whole_blocks=[1, 3])
    targets = some_targets()
    if not objects:
        targets = [{name: value[:0] for name, value in one.items()} for one in targets]
    losses = model(some_images(), targets)
    assert len(losses) == 5
    sum(losses.values()).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())  # type: ignore[union-attr]


def test_refined_boxes_are_clipped_and_have_no_gradient() -> None:
    stage = detector().roi_heads.stages[1]
    boxes = [torch.tensor([[50.0, 10.0, 60.0, 20.0]]), torch.tensor([[0.0, 0.0, 8.0, 8.0]])]
    deltas = torch.tensor([[20.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 10.0]]).repeat(1, 9).requires_grad_()
    refined = refine(stage, deltas, boxes, SIZES)
    torch.testing.assert_close(refined[0], torch.tensor([[60.0, 10.0, 64.0, 20.0]]))
    half = 4 * torch.e  # a height of 8 e around 4
    torch.testing.assert_close(refined[1], torch.tensor([[0.0, 0.0, 8.0, 4.0 + half]]))
    assert not any(box.requires_grad for box in refined)


def test_initial_weights_are_those_of_one_stage() -> None:
    state = Detector(detection_config(heads="cascade")).state_dict()
    for number in range(3):
        predictor = f"roi_heads.stages.{number}.box_predictor"
        assert state[f"{predictor}.cls_score.weight"].std() == pytest.approx(0.01, rel=0.2)
        assert state[f"{predictor}.bbox_pred.weight"].std() == pytest.approx(0.001, rel=0.2)
    heads = [state[f"roi_heads.stages.{number}.box_head.fc6.weight"] for number in range(3)]
    assert heads[0].std() == pytest.approx((2 / (16 * 49)) ** 0.5, rel=0.1) and not torch.equal(heads[0], heads[1])


def test_layer_decay_is_vitdets() -> None:
    """detectron2: 0.7^(layers + 1 - depth), depth 0 for embeddings, i + 1 for block i, layers + 1 for the rest."""
    model = detector(window=3, whole_blocks=[1, 3])
    optimizer = build_optimizer(model, OptimizerConfig(lr=5e-5, layer_decay=0.7))
    scales = {id(member): group["lr_scale"] for group in optimizer.param_groups for member in group["params"]}
    rates = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    assert rates["encoder.patch_embed.weight"] == pytest.approx(0.7**5)
    for number in range(4):
        assert rates[f"encoder.blocks.{number}.attn.qkv.weight"] == pytest.approx(0.7 ** (4 - number))
    assert {rate for name, rate in rates.items() if not name.startswith("encoder.")} == {1.0}
