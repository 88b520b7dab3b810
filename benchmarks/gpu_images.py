"""Sections of benchmarks/gpu.py on images, of one modality and of several: agreement and waits.

An adversary here ascends by `sgd` where runs are compared: the other rules divide by a gradient's size, and so make of
rounding near zero a whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from benchmarks.gpu_parity import Comparison, waits_item
from benchmarks.gpu_setting import Item, Setting, shrink
from benchmarks.method_cost import BALANCING
from benchmarks.steps import Precision, Workload, endless
from benchmarks.workloads import MM_MAE, EncoderSize, image_recipe, mae_workload, mm_mae_workload
from trp_scale.config.registry import make_settings
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig

ADVERSARIES: dict[str, Literal["absolute", "relative"]] = {
    "absolute_coordinate": "absolute",
    "relative_coordinate": "relative",
}
"""vision.positions of each."""
COMPARED = ("fsdp", "zero1", "zero2", "zero3")


def image_config(
    setting: Setting,
    recipe: str,
    *,
    size: EncoderSize,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    kind: str = "none",
) -> MaeConfig:
    """A recipe without end; relative positions have the relaxed index with and without an adversary, so that both do
    the same arithmetic."""
    config = image_recipe(recipe, MaeConfig, size)
    shrink(setting, config)
    if setting.small:
        config.crops.size, config.vision.patch_size = (64, 16) if recipe.startswith("mae_vit") else (32, 8)
    config.vision.index, config.adversary = "relaxed", make_settings("adversary", kind)
    config.vision.positions = ADVERSARIES.get(kind, "absolute")
    config.optimizer.lr = 1e-4
    return endless(config, rows, accumulation=accumulation, precision=precision)


def modality_config(
    setting: Setting,
    *,
    size: EncoderSize,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    balancer: str = "minimax",
) -> MmMaeConfig:
    """MM-MAE's recipe without end."""
    config = image_recipe(MM_MAE, MmMaeConfig, size)
    shrink(setting, config)
    if setting.small:
        config.crops.size, config.modalities.visible_tokens = 64, 8
    config.balancer, config.optimizer.lr = replace(BALANCING[balancer][0]), 1e-4
    return endless(config, rows, accumulation=accumulation, precision=precision)


def checked(setting: Setting, precision: Precision = "bf16", kind: str = "relative_coordinate") -> Workload:
    """A small model that is trained many times, two micro-batches a step, with an adversary that moves."""
    rows = 2 if setting.small else 16
    config = image_config(
        setting, "mae_plus_vit_b", size="tiny", rows=rows, accumulation=2, precision=precision, kind=kind
    )
    config.crops.count, config.optimizer.lr = 2, 1e-3
    config.model.layers = min(config.model.layers, 4)
    config.vision.decoder_layers = min(config.vision.decoder_layers, 2)
    # The relative tables begin at zero, and so does the adversary's gradient: it takes a large step to get anywhere.
    config.adversary.ascent, config.adversary.lr, config.adversary.eps = "sgd", 1e5, 5.0
    return mae_workload(config)


def images(setting: Setting) -> Iterator[Item]:
    """Agreement and waits."""
    comparison = Comparison(setting, partial(checked, setting))
    yield from comparison.items("adversary, ", {layout: layout for layout in COMPARED}, seconds=6)
    relative, absolute = "relative_coordinate", "absolute_coordinate"
    for layout, kind in (("plain", relative), ("plain", absolute), ("fsdp", relative)):
        yield waits_item(setting, f"waits, {layout}, {kind}", layout, partial(checked, setting, kind=kind))


def checked_modalities(setting: Setting, precision: Precision = "bf16", balancer: str = "gradnorm") -> Workload:
    """A small model that is trained many times, two micro-batches a step."""
    rows = 2 if setting.small else 16
    config = modality_config(setting, size="tiny", rows=rows, accumulation=2, precision=precision, balancer=balancer)
    config.model.layers, config.optimizer.lr = min(config.model.layers, 4), 1e-3
    return mm_mae_workload(config)


def modalities(setting: Setting) -> Iterator[Item]:
    """Agreement and waits."""
    comparison = Comparison(setting, partial(checked_modalities, setting))
    yield from comparison.items("gradnorm, ", {layout: layout for layout in COMPARED}, seconds=6)
    for balancer in BALANCING:
        workload = partial(checked_modalities, setting, balancer=balancer)
        yield waits_item(setting, f"waits, {balancer}", "plain", workload)
