"""Settings of classification that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from trp_scale.config import RefusedError
from trp_scale.config.loader import check, load_recipe
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig


def recipe(name: str) -> ClassificationTaskConfig:
    config = load_recipe(name)
    assert isinstance(config, ClassificationTaskConfig)
    return config


def changed(**changes: Any) -> ClassificationTaskConfig:
    config = recipe("classification_mae_vit_b")
    for name, value in changes.items():
        section, field = name.split("__")
        assert hasattr(getattr(config, section), field)
        setattr(getattr(config, section), field, value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augmentation__magnitude": 11}, "--augmentation.magnitude is 11, allowed: from 0 to at most 10"),
        ({"augmentation__smoothing": 1.0}, "--augmentation.smoothing is 1.0, allowed: from 0 to below 1"),
        ({"crops__count": 2}, "--crops.count is 2, allowed for classification: 1"),
        ({"crops__min_scale": 2.0}, "--crops.min_scale is 2.0"),
        (
            {"batch__global_size": 3, "batch__micro_size": 3},
            "--batch.micro_size is 3,.*even numbers, for example 4",
        ),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        check(changed(**changes))


def test_without_mixing_a_micro_batch_may_be_odd() -> None:
    odd = {"batch__global_size": 3, "batch__micro_size": 3}
    check(changed(**odd, augmentation__mixup=0.0, augmentation__cutmix=0.0))
