"""Section `waits` of benchmarks/gpu.py: no step waits for the GPU. Section `captured` trains its small models too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_setting import (
    ENGINES,
    Figures,
    Item,
    Setting,
    image_config,
    lacking,
    modality_config,
    text,
    training,
)
from benchmarks.method_cost import BALANCING
from benchmarks.steps import Workload
from benchmarks.workloads import build_workload
from trp_scale.config.registry import Settings, make_settings

LR = 1e-3
EXACT = make_settings("balancer", "minimax", estimate="exact")
WAITED = "called a synchronizing CUDA operation"
EXPECTED_WAITS = 0
"""A step's numbers are copied behind its work and read a step later, by an event that torch does not warn about."""
OWN_WAITS = ("plain", "ddp", "fsdp")
"""Layouts that are expected to wait no more than that; DeepSpeed's own waits are counted and shown."""


def checked_text(
    setting: Setting, *, balancer: Settings = EXACT, accumulation: int = 2, dropout: float = 0.0
) -> Workload:
    """PoS-BERT; with minimax `exact` and two micro-batches the pre-pass is taken too."""
    model, rows = replace(setting.checked, dropout=dropout), 2 if setting.small else 16
    return text(setting, model, rows=rows, accumulation=accumulation, balancer=balancer, lr=LR)


def checked_images(setting: Setting, *, kind: str = "relative_coordinate", accumulation: int = 2) -> Workload:
    """MAE+ with an adversary."""
    rows = 2 if setting.small else 16
    config = image_config(setting, "mae_plus_vit_b", size="tiny", rows=rows, accumulation=accumulation, kind=kind)
    config.crops.count, config.optimizer.lr = 2, LR
    config.model.layers = min(config.model.layers, 4)
    config.vision.decoder_layers = min(config.vision.decoder_layers, 2)
    return build_workload(config)


def checked_modalities(setting: Setting, *, balancer: str = "gradnorm", accumulation: int = 2) -> Workload:
    """MM-MAE."""
    rows = 2 if setting.small else 16
    config = modality_config(setting, size="tiny", rows=rows, accumulation=accumulation, balancer=balancer)
    config.model.layers, config.optimizer.lr = min(config.model.layers, 4), LR
    return build_workload(config)


def waits_of(step: Callable[[], object]) -> list[str]:
    """Where the host waited for the GPU in a call: "file:line" of each wait that torch warns about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(one.filename).name}:{one.lineno}" for one in caught if WAITED in str(one.message)]


def waited(setting: Setting, layout: str, workload: Callable[[], Workload]) -> Figures:
    """How often a step waits for the GPU; expected: EXPECTED_WAITS on plain and FSDP2."""
    with training(setting, layout, workload()) as trainer:
        for _ in range(3):
            trainer.train_step()
        places = waits_of(trainer.train_step)
    figures: Figures = {"waits": len(places), "places": places}
    if layout not in OWN_WAITS:
        return figures
    return {**figures, "expected": EXPECTED_WAITS, "as_expected": len(places) == EXPECTED_WAITS}


def waits(setting: Setting) -> Iterator[Item]:
    """How often a step waits: text with accumulation and without, adversaries, balancers."""
    works: dict[str, tuple[str, Callable[[], Workload]]] = {
        f"{layout}, accumulation {number}": (layout, partial(checked_text, setting, accumulation=number))
        for layout in ENGINES
        for number in (1, 2)
    }
    for layout, kind in (("plain", "relative"), ("plain", "absolute"), ("fsdp", "relative")):
        works[f"{layout}, {kind}"] = (layout, partial(checked_images, setting, kind=f"{kind}_coordinate"))
    works |= {f"plain, {name}": ("plain", partial(checked_modalities, setting, balancer=name)) for name in BALANCING}
    for name, (layout, workload) in works.items():
        lacks, measure = setting.no_gpu or lacking(layout), partial(waited, setting, layout, workload)
        yield Item(name=name, measure=measure, seconds=8, lacking=lacks)
