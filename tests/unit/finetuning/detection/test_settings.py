"""Settings of detection that are refused, by flag."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.finetuning.detection.small_sets import detection_config
from trp_scale.config.loader import general_problems
from trp_scale.finetuning.detection.settings import DetectionTaskConfig


def small_detector(**detection: Any) -> DetectionTaskConfig:
    config = detection_config(**detection)
    config.data.path = "data"
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"detection.score_threshold": 1.5}, "--detection.score_threshold is 1.5"),
        ({"detection.mask_size": 1}, "--detection.mask_size is 1"),
        ({"detection.min_scale": 2.0}, "the first not above the second"),
        ({"crops.flip": -0.1}, "--crops.flip is -0.1"),
        ({"crops.size": 56}, "multiples of four patches, 32 pixels, for example 32"),
        ({"vision.patch_size": 14, "crops.size": 56}, "a power of two from 4"),
        ({"model.layers": 6}, "--detection.pyramid fpn"),
        ({"detection.window": -1}, "--detection.window is -1"),
        ({"detection.whole_blocks": [1]}, "--detection.whole_blocks is 1, allowed: with --detection.window above 0"),
        ({"detection.window": 3, "detection.whole_blocks": [1, 4]}, "--detection.whole_blocks is 1 4"),
        ({"detection.window": 3, "detection.whole_blocks": [2, 1]}, "--detection.whole_blocks is 2 1"),
        ({"detection.window": 3}, "--detection.window is 3, but none of the 4 blocks"),
        (
            {"detection.window": 3, "detection.whole_blocks": [0, 1, 2, 3]},
            "--detection.window is 3, but none of the 4 blocks",
        ),
    ],
    ids=str,
)
def test_invalid_settings_are_named(changes: dict[str, Any], message: str) -> None:
    config = small_detector(pyramid="fpn")
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    problems = list(general_problems(config))
    assert len(problems) == 1 and message in problems[0]
