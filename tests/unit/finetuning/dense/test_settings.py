"""The recipes of segmentation and depth follow their tables, and settings that no head can have are refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from trp_scale.config import RefusedError
from trp_scale.config.checks import check
from trp_scale.config.loader import flat, load_recipe
from trp_scale.finetuning.dense.settings import DenseTaskConfig

JITTER = {"dense.min_scale": 0.1, "dense.max_scale": 2.0, "dense.scaled_side": "longer"}
"""Ghiasi et al.'s LSJ."""

SEGMENTATION = {
    **JITTER,
    "downstream.epochs": 100,
    "downstream.warmup_share": 20 / 100,
    "downstream.drop_path": 0.1,
    "batch.global_size": 1024,
    "optimizer.lr": 1e-4,
    "optimizer.min_lr": 1e-6,
    "optimizer.weight_decay": 0.05,
    "optimizer.layer_decay": 0.75,
    "optimizer.schedule": "cosine",
    "vision.patch_size": 16,
    "crops.size": 224,
}

TABLES: dict[str, dict[str, Any]] = {
    # TRP 001, Table 7
    "segmentation_imagenet_s50_vit_b": SEGMENTATION,
    "segmentation_nyuv2_vit_b": SEGMENTATION,
    "depth_nyuv2_vit_b": {
        **SEGMENTATION,
        "downstream.epochs": 2000,
        "downstream.warmup_share": 100 / 2000,
        "downstream.drop_path": 0.0,
        "batch.global_size": 2048,
        "optimizer.min_lr": 0.0,
        "optimizer.weight_decay": 1e-4,
        "crops.size": 256,
        "dense.max_depth": 10.0,
        "dense.region": "eigen",
    },
    # MLO-MAE, B.6
    "segmentation_ade20k_mlo_mae_vit_b": {
        "downstream.epochs": 0,
        "training.steps": 160_000,
        "batch.global_size": 8,
        "optimizer.lr": 1e-4,
        "dense.head": "upernet",
    },
    # AdPE, 5.2
    "segmentation_ade20k_adpe_vit_b": {
        "downstream.epochs": 100,
        "batch.global_size": 16,
        "optimizer.lr": 2e-4,
        "dense.head": "upernet",
    },
}


def recipe(name: str) -> DenseTaskConfig:
    config = load_recipe(name)
    assert isinstance(config, DenseTaskConfig)
    return config


@pytest.mark.parametrize("name", TABLES)
def test_recipes_follow_their_tables(name: str) -> None:
    config = recipe(name)
    check(config)
    found = flat(asdict(config))
    assert {key: found[key] for key in TABLES[name]} == TABLES[name]
    assert (config.optimizer.kind, config.optimizer.beta1, config.optimizer.beta2) == ("adamw", 0.9, 0.999)


@pytest.mark.parametrize("name", ["segmentation_tiny", "depth_tiny"])
def test_tiny_recipes_are_allowed(name: str) -> None:
    check(recipe(name))


def test_one_patch_has_no_half() -> None:
    config = recipe("segmentation_ade20k_adpe_vit_b")
    config.crops.size = 16
    with pytest.raises(RefusedError, match=r"--crops.size is 16, .*--dense.head upernet"):
        check(config)
    config.crops.size = 32
    check(config)
