"""The recipes of learned masks follow their tables, differ in what they are named for, and their commands parse."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from trp_scale.config import Config
from trp_scale.config.loader import load_recipe
from trp_scale.config.recipes import RECIPES
from trp_scale.config.run_flags import parse
from trp_scale.methods.learned_masks.settings import LabelledSettings

HEADS = {
    name: re.split("\n\\w", (RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), maxsplit=1)[0]
    for name in ("mlo_mae_imagenet", "mlo_mae_cifar")
}


def given(recipe: str, *flags: str) -> Config:
    return parse(["--recipe", recipe, "--data.path", "x", *flags]).config


def test_imagenet_follows_table_11() -> None:
    config = load_recipe("mlo_mae_imagenet")
    levels, optimizer = config.multilevel, config.optimizer
    assert (config.model.layers, config.model.hidden_size, config.crops.size, config.vision.patch_size) == (
        12,
        768,
        224,
        16,
    )
    assert optimizer.lr == pytest.approx(1e-4 * config.batch.global_size / 256)
    assert (levels.head_lr, levels.lr) == (4e-5, 4e-5)
    assert (optimizer.weight_decay, levels.head_weight_decay, levels.weight_decay) == (0.05, 0.05, 0.05)
    assert (optimizer.beta1, optimizer.beta2, optimizer.schedule) == (0.9, 0.95, "cosine")
    assert (config.batch.global_size, levels.batch_size, levels.unroll, config.masking.ratio) == (256, 0, 1, 0.75)
    assert (config.multilevel.network, config.multilevel.hidden_size) == ("flattened", 512)
    assert config.training.steps == pytest.approx(50 * 0.8 * 1_281_167 / 256, abs=1)


def test_cifar_follows_table_12() -> None:
    config = load_recipe("mlo_mae_cifar")
    levels, optimizer = config.multilevel, config.optimizer
    assert (config.crops.size, config.vision.patch_size, config.batch.global_size, levels.unroll) == (32, 2, 128, 2)
    assert optimizer.lr == pytest.approx(1e-3 * config.batch.global_size / 256)
    assert (levels.head_lr, levels.lr, config.masking.ratio) == (1e-3, 1e-3, 0.75)
    assert config.training.steps == 200 * 40_000 / 128
    imagenet = load_recipe("mlo_mae_imagenet")
    assert (config.model, config.vision.decoder_layers) == (imagenet.model, imagenet.vision.decoder_layers)
    assert config.masking == imagenet.masking


def test_each_baseline_differs_in_what_it_is_named_for() -> None:
    ours, two_levels, uniform = (load_recipe(name) for name in ("mlo_mae_cifar", "blo_mae_cifar", "u_mae_cifar"))
    assert (two_levels.multilevel.kind, two_levels.multilevel.gamma) == ("joint", 1.0)
    shared = {field.name for field in fields(LabelledSettings)} - {"kind"}
    assert all(getattr(two_levels.multilevel, name) == getattr(ours.multilevel, name) for name in shared)
    two_levels.multilevel = ours.multilevel
    assert two_levels == ours
    assert (uniform.objective.uniformity, uniform.multilevel.kind, uniform.masking.maskings) == (0.01, "none", 0)
    assert uniform.training.steps == 200 * 50_000 / 128
    for section in ("model", "vision", "crops", "batch", "optimizer"):
        assert getattr(uniform, section) == getattr(ours, section)


@pytest.mark.parametrize("name", HEADS)
def test_the_flags_that_a_recipe_names_are_settings(name: str) -> None:
    """Each of them alone, and eq. 13's flag for a run that is not refused; DIR stands for weights, which are read."""
    pairs = re.findall(r"(--[a-z_]+\.[a-z_]+) ((?!DIR)[\w./]+)", HEADS[name])
    assert len(pairs) >= 3
    for flag, value in pairs:
        section, field = flag.removeprefix("--").split(".")
        config = given(name, *([flag, value] if field != "final_ratio" else ["--masking.ratio", "0.5", flag, value]))
        assert str(getattr(getattr(config, section), field)) == value
