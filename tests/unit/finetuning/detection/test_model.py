"""The detector against torchvision's Mask R-CNN; the cascade of box heads against torchvision's heads of one stage and
short loops; and what an engine and a task rely on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image, roi_align

from tests.unit.finetuning.detection.small_sets import detection_config
from trp_scale.config import OptimizerConfig
from trp_scale.engines.optimizer import build_optimizer
from trp_scale.finetuning.detection.model import (
    BlockPyramid,
    CascadeHeads,
    Detector,
    SimplePyramid,
    match_boxes,
    paste,
    refine,
)

SIDE = 64


def some_targets() -> list[dict[str, Tensor]]:
    """Of two images: two objects and one."""
    boxes = [torch.tensor([[4.0, 6.0, 30.0, 40.0], [20.0, 30.0, 60.0, 50.0]]), torch.tensor([[8.0, 8.0, 24.0, 40.0]])]
    found = []
    for each in boxes:
        masks = torch.zeros(len(each), SIDE, SIDE, dtype=torch.uint8)
        for mask, box in zip(masks, each.long().tolist(), strict=True):
            mask[box[1] : box[3], box[0] : (box[0] + box[2]) // 2] = 1
        found.append({"boxes": each, "labels": torch.arange(1, len(each) + 1), "masks": masks})
    return found


def some_images() -> Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(3))


class Backbone(nn.Module):
    """Our encoder and pyramid as torchvision wants them."""

    def __init__(self, detector: Detector, channels: int) -> None:
        super().__init__()
        self.encoder, self.pyramid, self.out_channels = detector.encoder, detector.pyramid, channels

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return self.pyramid(self.encoder(images, self.pyramid.block_numbers(4)))


class AsGiven(nn.Module):
    """In place of torchvision's transform: images come in squares and normalised."""

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]] | None) -> tuple[object, object]:
        from torchvision.models.detection.image_list import ImageList

        return ImageList(images, [(SIDE, SIDE)] * len(images)), targets

    def postprocess(self, result: object, *_: object) -> object:
        return result


@pytest.mark.parametrize("masks", ["on", "off"])
@pytest.mark.parametrize("pyramid", ["simple", "fpn"])
def test_losses_and_detections_are_those_of_torchvisions_model(pyramid: str, masks: str) -> None:
    detector = Detector(detection_config(pyramid=pyramid, masks=masks, score_threshold=0.0))
    kind = MaskRCNN if masks == "on" else FasterRCNN
    whole = kind(Backbone(detector, 16), num_classes=9)
    whole.transform, whole.rpn, whole.roi_heads = AsGiven(), detector.rpn, detector.roi_heads
    targets = some_targets()
    torch.manual_seed(5)
    ours = detector(some_images(), targets)
    torch.manual_seed(5)
    theirs = whole.train()(some_images(), targets)
    assert set(ours) == set(theirs) and len(ours) == (5 if masks == "on" else 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        mine, other = detector(some_images()), whole.eval()(some_images())
    for one, another in zip(mine, other, strict=True):
        assert set(one) == set(another) == {"boxes", "labels", "scores"} | ({"masks"} if masks == "on" else set())
        assert len(one["boxes"]) == 100 and all(torch.equal(one[name], another[name]) for name in one)


def test_losses_are_given_in_either_mode_and_leave_it() -> None:
    detector = Detector(detection_config())
    found = []
    for mode in (True, False):
        detector.train(mode)
        torch.manual_seed(5)
        found.append(detector(some_images(), some_targets()))
        assert detector.encoder.training is mode
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("objects", [True, False])
@pytest.mark.parametrize("changes", [{}, {"heads": "cascade", "window": 3, "whole_blocks": [1, 3]}], ids=str)
def test_every_parameter_has_a_gradient_even_without_objects(changes: dict[str, Any], objects: bool) -> None:
    detector = Detector(detection_config(**changes))
    targets = some_targets()
    if not objects:
        targets = [{name: value[:0] for name, value in one.items()} for one in targets]
    losses = detector(some_images(), targets)
    assert len(losses) == 5
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert not [name for name, parameter in detector.named_parameters() if parameter.grad is None]
    assert all(bool(parameter.grad.isfinite().all()) for parameter in detector.parameters())  # type: ignore[union-attr]


def test_levels_have_their_strides_and_see_their_place() -> None:
    for kind, count in ((SimplePyramid, 1), (BlockPyramid, 4)):
        pyramid = kind(32, 16)
        tokens = [torch.randn(1, 1 + 8 * 8, 32) for _ in range(count)]
        maps = pyramid(tokens)
        assert [tuple(one.shape) for one in maps.values()] == [(1, 16, side, side) for side in (32, 16, 8, 4, 2)]
        assert list(maps) == ["0", "1", "2", "3", "pool"]
        assert pyramid.block_numbers(12) == ([] if count == 1 else [2, 5, 8, 11])
        changed = [one.clone() for one in tokens]
        for one in changed:
            one[:, 1 + 8 * 6 + 1] += 1.0  # the patch in row 6, column 1
        moved = (pyramid(changed)["0"] - maps["0"]).abs().sum(1)[0] > 1e-6
        if count == 1:  # within a cell of the patch's 4 x 4 cells; the other pyramid joins coarse levels, too
            assert moved[23:29, 3:9].all() and not moved[:22].any() and not moved[:, 10:].any()
        else:
            assert moved[24:28, 4:8].all()


def test_boxes_stay_in_single_precision_under_autocast() -> None:
    detector = Detector(detection_config(score_threshold=0.0))
    seen: list[Tensor] = []
    detector.rpn.register_forward_hook(lambda _, __, output: seen.extend(output[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = detector(some_images())
        losses = detector(some_images(), some_targets())
    assert all(boxes.dtype == torch.float32 for boxes in seen)
    assert all(one["boxes"].dtype == one["scores"].dtype == torch.float32 for one in found)
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    rounded = sum(bool((one["boxes"] == one["boxes"].bfloat16().float()).all()) for one in found)
    assert rounded == 0


def test_weights_of_sixteen_bits_learn_and_detect_in_single_precision() -> None:
    """DeepSpeed's weights: the pyramid's levels are float32, the heads' weights are not."""
    exact = Detector(detection_config(score_threshold=0.0))
    losses = []
    for detector in (exact, copy.deepcopy(exact).bfloat16()):
        torch.manual_seed(5)
        losses.append(detector(some_images(), some_targets()))
        with torch.no_grad():
            assert all(one["boxes"].dtype == torch.float32 for one in detector(some_images()))
    for name in ("loss_objectness", "loss_rpn_box_reg", "loss_mask"):
        assert losses[1][name].dtype == torch.float32
        assert float(losses[1][name].detach()) == pytest.approx(float(losses[0][name].detach()), rel=0.1)
    sum(losses[1].values()).backward()  # type: ignore[union-attr]
    assert all(parameter.grad is not None for parameter in detector.parameters())


def test_thresholds_and_shares_of_samples_are_torchvisions() -> None:
    """Those of Ren et al. and He et al., which the recipes do not change."""
    detector = Detector(detection_config())
    theirs = MaskRCNN(Backbone(detector, 16), num_classes=9)
    for ours, other in ((detector.rpn, theirs.rpn), (detector.roi_heads, theirs.roi_heads)):
        matcher, sampler = ours.proposal_matcher, ours.fg_bg_sampler
        for name in ("high_threshold", "low_threshold", "allow_low_quality_matches"):
            assert getattr(matcher, name) == getattr(other.proposal_matcher, name), name
        assert sampler.positive_fraction == other.fg_bg_sampler.positive_fraction
        assert ours.box_coder.weights == other.box_coder.weights
    assert detector.rpn.nms_thresh == theirs.rpn.nms_thresh
    assert detector.rpn.anchor_generator.aspect_ratios == ((0.5, 1.0, 2.0),) * 5
    assert detector.roi_heads.mask_roi_pool.output_size == theirs.roi_heads.mask_roi_pool.output_size
    assert detector.roi_heads.box_roi_pool.output_size == theirs.roi_heads.box_roi_pool.output_size
    for pool in (detector.roi_heads.box_roi_pool, detector.roi_heads.mask_roi_pool):
        assert pool.sampling_ratio == theirs.roi_heads.box_roi_pool.sampling_ratio


def test_settings_reach_torchvisions_modules() -> None:
    settings = {"score_threshold": 0.3, "suppression_threshold": 0.4, "detections": 7, "box_samples": 24}
    settings |= {"rpn_samples": 20, "train_proposals": 11, "test_proposals": 13}
    detector = Detector(detection_config(**settings))
    rpn, heads = detector.rpn, detector.roi_heads
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.3, 0.4, 7)
    assert (rpn.fg_bg_sampler.batch_size_per_image, heads.fg_bg_sampler.batch_size_per_image) == (20, 24)
    assert rpn._pre_nms_top_n == {"training": 22, "testing": 13}
    assert rpn._post_nms_top_n == {"training": 11, "testing": 13}


def test_initial_weights_follow_from_the_seed_alone() -> None:
    config = detection_config()
    first = Detector(config).state_dict()
    torch.manual_seed(99)
    again = Detector(config).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = copy.deepcopy(config)
    other.training.seed = 1
    logits = "rpn.head.cls_logits.weight"
    assert not torch.equal(Detector(other).state_dict()[logits], first[logits])
    assert first[logits].std() == pytest.approx(0.01, rel=0.3)
    assert first["roi_heads.box_predictor.bbox_pred.weight"].std() == pytest.approx(0.001, rel=0.1)
    assert first["roi_heads.box_head.fc6.weight"].std() == pytest.approx((2 / (16 * 49)) ** 0.5, rel=0.1)
    assert first["pyramid.rescale.0.0.weight"].std() == pytest.approx((2 / 32) ** 0.5, rel=0.1)
    assert not first["roi_heads.box_predictor.cls_score.bias"].any()


def test_anchors_and_levels_keep_their_proportion_to_the_patches() -> None:
    detector = Detector(detection_config())
    assert [sizes[0] for sizes in detector.rpn.anchor_generator.sizes] == [16, 32, 64, 128, 256]
    pool = detector.roi_heads.box_roi_pool
    # torchvision's rule: 224 pixels on stride 16; on patches of 8 pixels half of both.
    maps = {str(level): torch.full((1, 1, 128 // 2**level, 128 // 2**level), float(level)) for level in range(4)}
    sides = torch.tensor([30.0, 60.0, 120.0, 240.0])
    boxes = torch.stack([torch.zeros(4), torch.zeros(4), sides, sides], dim=1)
    assert pool(maps, [boxes], [(256, 256)])[:, 0, 3, 3].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_pasted_masks_are_zero_outside_their_boxes_and_align_with_roi_align() -> None:
    masks = torch.rand(3, 28, 28, generator=torch.Generator().manual_seed(0))
    masks = torch.nn.functional.avg_pool2d(masks[:, None], 9, 1, 4)[:, 0]
    boxes = torch.tensor([[3.0, 4.0, 31.0, 32.0], [10.5, 2.25, 50.0, 40.0], [0.0, 0.0, 60.0, 40.0]])
    found = paste(masks, boxes, (40, 60))
    assert found.shape == (3, 40, 60)
    assert torch.allclose(found[0, 4:32, 3:31], masks[0], atol=1e-5), "28 pixels wide: cells are pixels"
    outside = torch.ones(40, 60, dtype=torch.bool)
    outside[1:41, 10:51] = False
    assert not found[1][outside].any()
    back = roi_align(found[:, None], torch.cat([torch.arange(3.0)[:, None], boxes], 1), (28, 28), aligned=True)[:, 0]
    inner = (slice(None), slice(2, -2), slice(2, -2))
    assert (back[inner] - masks[inner]).abs().max() < 0.05
    assert paste(masks[:0], boxes[:0], (40, 60)).shape == (0, 40, 60)


SIZES = [(SIDE, SIDE)] * 2


def cascade(**settings: Any) -> Detector:
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
    model = cascade(masks=masks)
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
    stages = cascade().roi_heads.stages
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
    model = cascade(masks="off", detections=1000)
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
    model = cascade(masks="off", box_samples=1000)
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
    model = cascade(masks="off")
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


def test_refined_boxes_are_clipped_and_have_no_gradient() -> None:
    stage = cascade().roi_heads.stages[1]
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
    model = cascade(window=3, whole_blocks=[1, 3])
    optimizer = build_optimizer(model, OptimizerConfig(lr=5e-5, layer_decay=0.7))
    scales = {id(member): group["lr_scale"] for group in optimizer.param_groups for member in group["params"]}
    rates = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    assert rates["encoder.patch_embed.weight"] == rates["encoder.cls_token"] == pytest.approx(0.7**5)
    for number in range(4):
        assert rates[f"encoder.blocks.{number}.attn.qkv.weight"] == pytest.approx(0.7 ** (4 - number))
    assert {rate for name, rate in rates.items() if not name.startswith("encoder.")} == {1.0}
