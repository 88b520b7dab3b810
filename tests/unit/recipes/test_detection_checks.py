"""Settings of detection that cannot be, each named by its flag; and the recipes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.downstream.detection.small_sets import detection_config
from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.recipes.detection_checks import detection_problems
from trp_scale.recipes.finetune_checks import check_finetune
from trp_scale.recipes.loader import load_recipe


def test_a_small_detector_is_allowed() -> None:
    assert not list(detection_problems(detection_config()))


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("detection", "width", 0, "--detection.width is 0"),
        ("detection", "score_threshold", 1.5, "--detection.score_threshold is 1.5"),
        ("detection", "mask_size", 1, "--detection.mask_size is 1"),
        ("detection", "min_scale", 2.0, "the first not above the second"),
        ("crops", "size", 56, "multiples of four patches, 32 pixels, for example 32"),
        ("vision", "patch_size", 14, "a power of two from 4"),
        ("model", "layers", 6, "every fourth of the blocks, the encoder has 6"),
    ],
)
def test_what_cannot_be_is_named(section: str, name: str, value: Any, message: str) -> None:
    config = detection_config(pyramid="fpn")
    setattr(getattr(config, section), name, value)
    problems = list(detection_problems(config))
    assert len(problems) == 1 and message in problems[0]


@pytest.mark.parametrize("name", ["detection_coco_vit_b", "detection_voc2007_vit_b", "detection_tiny"])
def test_recipes_of_detection_are_allowed_and_train_the_plain_sum(name: str) -> None:
    config = load_recipe(name)
    assert isinstance(config, FinetuneConfig)
    check_finetune(config)
    balancer = config.balancer
    assert (balancer.kind, balancer.total, balancer.form) == ("uniform", "paper", "sum")
    config.detection.box_samples = 0
    with pytest.raises(RefusedError, match=r"--detection\.box_samples is 0"):
        check_finetune(config)


def test_a_probability_of_a_flip_is_one() -> None:
    config = load_recipe("detection_tiny")
    assert isinstance(config, FinetuneConfig)
    config.crops.flip = -0.1
    with pytest.raises(RefusedError, match=r"--crops\.flip is -0\.1, allowed: from 0 to at most 1"):
        check_finetune(config)
