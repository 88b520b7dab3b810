"""The recipes of classification follow their tables, and settings that no classifier can have are refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from trp_scale.config import RefusedError
from trp_scale.config.checks import check
from trp_scale.config.loader import load_recipe
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig

AUGMENTATION = {"magnitude": 9, "magnitude_deviation": 0.5, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1}
TABLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # He et al. 2022, Table 9
    "classification_mae_vit_b": ({"epochs": 100, "warmup_share": 5 / 100, "drop_path": 0.1}, {"layer_decay": 0.75}),
    "classification_mae_vit_l": ({"epochs": 50, "warmup_share": 5 / 50, "drop_path": 0.1}, {"layer_decay": 0.75}),
    "classification_fine_grained": ({"epochs": 100, "warmup_share": 5 / 100, "drop_path": 0.1}, {"layer_decay": 0.75}),
    # TRP 001, Table 7
    "classification_mm_mae_in1k": (
        {"epochs": 100, "warmup_share": 5 / 100, "drop_path": 0.1},
        {"layer_decay": 0.65, "min_lr": 1e-6},
    ),
    "classification_mm_mae_in_s50": (
        {"epochs": 100, "warmup_share": 5 / 100, "drop_path": 0.1},
        {"layer_decay": 0.65, "min_lr": 1e-6},
    ),
    # AdPE, Appendix A
    "classification_adpe_vit_b": ({"epochs": 100, "warmup_share": 5 / 100, "drop_path": 0.1}, {"layer_decay": 0.75}),
}


def recipe(name: str) -> ClassificationTaskConfig:
    config = load_recipe(name)
    assert isinstance(config, ClassificationTaskConfig)
    return config


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_imagenet(name: str) -> None:
    downstream, optimizer = TABLES[name]
    config = recipe(name)
    check(config)
    found = asdict(config)
    assert {key: found["downstream"][key] for key in downstream} == pytest.approx(downstream)
    expected = {"lr": 1e-3 * 1024 / 256, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.05, **optimizer}
    assert {key: found["optimizer"][key] for key in expected} == pytest.approx(expected)
    assert {key: found["augmentation"][key] for key in AUGMENTATION} == AUGMENTATION
    assert (config.batch.global_size, config.crops.size, config.optimizer.schedule) == (1024, 224, "cosine")
    assert config.augmentation.measured == "centre" and config.augmentation.centre_share == 224 / 256


def test_large_is_larger() -> None:
    base, large = recipe("classification_mae_vit_b").model, recipe("classification_mae_vit_l").model
    assert (base.layers, base.hidden_size, base.heads) == (12, 768, 12)
    assert (large.layers, large.hidden_size, large.heads, large.intermediate_size) == (24, 1024, 16, 4096)


def test_cifar_follows_appendix_b_4() -> None:
    config = recipe("classification_cifar")
    check(config)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.batch.global_size) == (1e-4, 5e-5, 64)
    assert (config.downstream.epochs, config.crops.size, config.crops.flip) == (100, 32, 0.5)
    pre_training = load_recipe("mlo_mae_cifar")
    assert config.crops == pre_training.crops and config.vision.patch_size == pre_training.vision.patch_size
    assert config.augmentation.magnitude == config.augmentation.mixup == config.augmentation.smoothing == 0


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
        ({"augmentation__mixup": -0.1}, "--augmentation.mixup is -0.1, allowed: 0 or more"),
        ({"augmentation__erasing": 1.5}, "--augmentation.erasing is 1.5, allowed: from 0 to at most 1"),
        ({"augmentation__smoothing": 1.0}, "--augmentation.smoothing is 1.0, allowed: from 0 to below 1"),
        ({"augmentation__centre_share": 0.0}, "--augmentation.centre_share is 0.0"),
        ({"augmentation__operations": 0}, "--augmentation.operations is 0"),
        ({"crops__count": 2}, "--crops.count is 2, allowed for classification: 1"),
        ({"crops__min_scale": 2.0}, "--crops.min_scale is 2.0"),
        (
            {"batch__global_size": 3, "batch__micro_size": 3},
            "--batch.micro_size is 3,.*even numbers, for example 4",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        check(changed(**changes))


def test_without_mixing_a_micro_batch_may_be_odd() -> None:
    odd = {"batch__global_size": 3, "batch__micro_size": 3}
    check(changed(**odd, augmentation__mixup=0.0, augmentation__cutmix=0.0))
