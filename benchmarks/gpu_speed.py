"""Sections of benchmarks/gpu.py on speed: ours beside transformers, and what minimax weighting costs over uniform."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu_setting import (
    Figures,
    Item,
    Setting,
    best_size,
    engine_of,
    release_memory,
    step_of,
    text,
    text_config,
    use_of_peak,
)
from benchmarks.method_cost import MINIMAX
from benchmarks.rounds import Measured, alternate
from benchmarks.step_time import SAME_LOSS, both_sides, relative_gap
from benchmarks.steps import model_flops, trainer_of
from benchmarks.workloads import VOCABULARY, random_batch, text_workload
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.pos_bert.settings import PosBertObjectiveConfig
from trp_scale.training.loop import Trainer

TOKENS_TRIED = (8_192, 16_384, 32_768, 65_536, 131_072)
"""Tokens of a micro-batch in the search; rows = tokens / length."""


def rows_tried(setting: Setting, length: int) -> list[int]:
    return [2, 4] if setting.small else [tokens // length for tokens in TOKENS_TRIED]


def speed(setting: Setting, length: int, rows: int, seconds: float) -> Figures:
    """Step time, rate, and use of the device's peak.

    `utilisation` has the same numerator on both sides: the arithmetic of BERT with only the first and the masked
    positions in the last layer and the head.
    """
    config = text_config(setting.base, rows=rows)
    config.masking.limit = setting.lengths[length]
    flops = model_flops(config, DataFacts(length=length, vocabulary=VOCABULARY))
    return {
        "step_ms": seconds * 1e3,
        "rows_per_second": rows / seconds,
        "tokens_per_second": rows * length / seconds,
        **use_of_peak(setting, seconds, utilisation=flops),
    }


def alternate_sides(
    setting: Setting, length: int, rows: int, *, compiled: bool
) -> tuple[dict[str, Measured], list[float]]:
    """Alternate steps of both sides on the same weights and rows; their first losses are compared without compile."""
    config = text_config(setting.base, rows=rows)
    config.training.compile = "whole" if compiled else "none"
    config.objective = PosBertObjectiveConfig(other="task")
    work = text_workload(config, length, setting.lengths[length])
    sides, losses = both_sides(work, setting.device, check=not compiled)  # eval mode would be compiled too
    return alternate(sides, rounds=setting.rounds, warmup=3), losses


def beside_transformers(setting: Setting, length: int, rows: int, *, compiled: bool) -> Figures:
    """Both sides at `rows`, or at the largest half of it that fits both."""
    if compiled:
        torch._dynamo.reset()
    while True:
        try:
            measured, losses = alternate_sides(setting, length, rows, compiled=compiled)
            break
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
        release_memory()  # here, not above: the exception holds the tensors
    figures: Figures = {"rows": rows}
    for side, one in measured.items():
        figures |= {f"{side}_{name}": value for name, value in speed(setting, length, rows, one.wall).items()}
    figures["step_ours_over_transformers"] = measured["ours"].wall / measured["transformers"].wall
    return figures | same_work(losses) if losses else figures


def same_work(losses: list[float]) -> Figures:
    """First losses of ours and of the peer."""
    gap = relative_gap(losses)
    return {"first_losses": losses, "first_loss_gap": gap, "same_work": gap < SAME_LOSS}


def matrix_product(setting: Setting) -> Figures:
    """What the device reaches in a large bf16 matrix product: the ceiling of everything below."""
    size = 8192
    left, right = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))

    def ten_products() -> None:
        for _ in range(10):
            left @ right

    seconds = alternate({"product": ten_products}, rounds=10)["product"].wall / 10
    flops = 2.0 * size**3
    return {"size": size, "tflops": flops / seconds / 1e12, **use_of_peak(setting, seconds, utilisation=flops)}


def throughput(setting: Setting) -> Iterator[Item]:
    """BERT-base in bf16, plain engine, beside transformers' model with autocast, SDPA and fused AdamW."""
    best: dict[int, int] = {}

    def find(length: int) -> Figures:
        # One engine for all sizes: BERT-base takes seconds to make.
        work = text(setting, setting.base, length, rows=1)
        engine = engine_of(setting, "plain", work)

        def trainer(rows: int) -> AbstractContextManager[Trainer]:
            config, batch = text_config(setting.base, rows=rows), random_batch(rows, length, setting.lengths[length])
            return nullcontext(trainer_of(engine, replace(work, config=config, rows=batch)))

        found = best_size(setting, rows_tried(setting, length), trainer)
        best[length] = found.rows
        return {**found.figures, **speed(setting, length, found.rows, found.seconds)}

    def compare(length: int, compiled: bool) -> Figures:
        # Without a search (it failed, or was skipped) a size that surely fits.
        return beside_transformers(setting, length, best.get(length, rows_tried(setting, length)[0]), compiled=compiled)

    yield Item(
        name="bf16 matrix product",
        measure=partial(matrix_product, setting),
        seconds=3,
        lacking=setting.no_gpu,
        timed=True,
    )
    for length in setting.lengths:
        yield Item(
            name=f"{length} tokens, our loop, rows searched", measure=partial(find, length), seconds=25, timed=True
        )
        name = f"{length} tokens, beside transformers"
        yield Item(name=name, measure=partial(compare, length, False), seconds=25, timed=True)
    for length in setting.lengths:
        yield Item(
            name=f"{length} tokens, beside transformers, both compiled",
            measure=partial(compare, length, True),
            seconds=75,
            timed=True,
            lacking=setting.no_gpu and f"torch.compile is measured on a GPU only: {setting.no_gpu}",
        )


def minimax(setting: Setting) -> Iterator[Item]:
    """The whole loop on BERT-base with uniform, lagged and exact weights, in turn, accumulation 1; at most 1.01."""

    def measure(length: int) -> Figures:
        rows = rows_tried(setting, length)[1 if setting.small else 3]
        steps = {}
        for name, balancer in MINIMAX.items():
            work = text(setting, setting.base, length, rows=rows, balancer=balancer)
            steps[name] = step_of(setting, work)
        measured = alternate(steps, rounds=setting.rounds, warmup=3)
        figures: Figures = {"rows": rows}
        for name, one in measured.items():
            key = name.replace(" ", "_")
            figures[f"{key}_step_ms"] = one.wall * 1e3
            figures[f"{key}_over_uniform"] = one.wall / measured["uniform"].wall
        return figures

    for length in setting.lengths:
        yield Item(name=f"{length} tokens", measure=partial(measure, length), seconds=25, timed=True)
