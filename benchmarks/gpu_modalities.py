"""Section of benchmarks/gpu.py on MM-MAE: agreement with GradNorm's taps, waits, cost of each balancer, speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.gpu_images import COMPARED
from benchmarks.gpu_items import Figures, Item
from benchmarks.gpu_parity import Comparison, waited
from benchmarks.gpu_setting import Setting, shrink, step_of, training
from benchmarks.gpu_sizes import best_size, use_of_peak
from benchmarks.image_steps import CLASSES, MM_MAE, EncoderSize, image_recipe, mm_mae_workload
from benchmarks.method_cost import BALANCING
from benchmarks.rounds import alternate, pair_ratio
from benchmarks.steps import Precision, Workload, endless
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.upstream import mm_mae_step_flops

ROWS = (64, 128, 256)
"""Images of a micro-batch that are tried."""


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


def speed(setting: Setting) -> Figures:
    """Images per second of the whole loop, use of the device's peak, and peak memory, at the best size tried."""

    def config(rows: int) -> MmMaeConfig:
        return modality_config(setting, size="base", rows=rows)

    found = best_size(setting, ROWS, lambda rows: training(setting, "plain", mm_mae_workload(config(rows))))
    whole, computed = (
        mm_mae_step_flops(config(found.rows), rows=found.rows, classes=CLASSES, computed=computed)
        for computed in (False, True)
    )
    used = use_of_peak(setting, found.seconds, utilisation=whole, computed_utilisation=computed)
    return {**found.figures, **used}


def overheads(setting: Setting) -> Figures:
    """Each balancer's step over uniform's, ViT-B, median of ratios within a round."""
    rows = 2 if setting.small else 256
    steps = {}
    for balancer in BALANCING:
        config = modality_config(setting, size="base", rows=rows, balancer=balancer)
        steps[balancer] = step_of(setting, mm_mae_workload(config))
    measured = alternate(steps, rounds=2 if setting.small else 20, warmup=3)
    base = measured["uniform"].walls
    ratios = {f"{name}_over_uniform": pair_ratio(one.walls, base).median for name, one in measured.items()}
    return {"images": rows, "uniform_step_ms": measured["uniform"].wall * 1e3, **ratios}


def checked(setting: Setting, precision: Precision = "bf16", balancer: str = "gradnorm") -> Workload:
    """A small model that is trained many times, two micro-batches a step."""
    rows = 2 if setting.small else 16
    config = modality_config(setting, size="tiny", rows=rows, accumulation=2, precision=precision, balancer=balancer)
    config.model.layers, config.optimizer.lr = min(config.model.layers, 4), 1e-3
    return mm_mae_workload(config)


def modalities(setting: Setting) -> Iterator[Item]:
    """Agreement and waits first, then figures."""
    comparison = Comparison(setting, partial(checked, setting))
    yield from comparison.items("gradnorm, ", {layout: layout for layout in COMPARED}, seconds=6)
    for balancer in BALANCING:
        yield Item(
            name=f"waits, {balancer}",
            measure=partial(waited, setting, "plain", partial(checked, setting, balancer=balancer)),
            seconds=5,
            lacking=setting.no_gpu,
        )
    yield Item(name="balancers over uniform", measure=partial(overheads, setting), seconds=30, timed=True)
    yield Item(name="MM-MAE ViT-B/16", measure=partial(speed, setting), seconds=15, timed=True)
