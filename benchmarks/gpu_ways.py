"""Sections of benchmarks/gpu.py on how a step is computed (precision, compile), what learned masks cost, and where a
step's time goes: kernels by share, and how long the GPU is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_images import ADVERSARIES, image_config, modality_config
from benchmarks.gpu_parity import apart, train
from benchmarks.gpu_setting import (
    MEGABYTE,
    Figures,
    Item,
    Setting,
    release_memory,
    text,
    training,
    use_of_peak,
)
from benchmarks.rounds import alternate
from benchmarks.steps import SameWindow, Workload, model_flops
from benchmarks.workloads import (
    VOCABULARY,
    cycle,
    cycle_steps,
    ending_early,
    mae_workload,
    masks_trainer,
    mm_mae_workload,
    plain_engines,
    without_list,
)
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

Way = dict[str, str]
"""Settings of the section `training` that differ from their defaults."""

WAYS: dict[str, Way] = {
    "autocast": {},
    "bf16 weights": {"weights": "bf16"},
    "autocast, compiled blocks": {"compile": "blocks"},
    "bf16 weights, compiled blocks": {"weights": "bf16", "compile": "blocks"},
    "bf16 weights, compiled whole": {"weights": "bf16", "compile": "whole"},
}
"""All in bf16."""
TEXT, IMAGES = "BERT-base, 128 tokens", "MAE ViT-B/16"
ROWS = {TEXT: 256, IMAGES: 256}
BF16: Way = {"weights": "bf16", "gradients": "bf16"}
COMPARED: dict[str, tuple[str, Way]] = {
    "plain, bf16 weights": ("plain", {"weights": "bf16"}),
    "ddp, bf16 weights": ("ddp", BF16),
    "fsdp, bf16 weights": ("fsdp", BF16),
}


def set_way(work: Workload, way: Way) -> Workload:
    """The same work, computed so."""
    for name, value in {"compile": "none", **way}.items():
        setattr(work.config.training, name, value)
    return work


def workload(setting: Setting, model: str, way: Way) -> tuple[Workload, float]:
    """What is trained, and the FLOPs of a step."""
    rows = 2 if setting.small else ROWS[model]
    if model == IMAGES:
        config = image_config(setting, "mae_vit_b", size="base", rows=rows)
        return set_way(mae_workload(config), way), model_flops(config)
    length = min(setting.lengths)
    masked = setting.lengths[length]
    work = set_way(text(setting, setting.base, length, rows=rows), way)
    assert isinstance(work.config, PosBertConfig)
    work.config.masking.limit = masked
    return work, model_flops(work.config, DataFacts(length=length, vocabulary=VOCABULARY))


def speed(setting: Setting, model: str, way: Way) -> Figures:
    """Step time of the whole loop on plain, use of the peak by what is computed, peak memory."""
    if "compile" in way:
        torch._dynamo.reset()
    release_memory()
    work, flops = workload(setting, model, way)
    with training(setting, "plain", work) as trainer:
        trainer.engine.train(True)
        for _ in range(2):
            trainer.train_step()
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats(setting.device)
        seconds = alternate({"step": trainer.train_step}, rounds=setting.rounds)["step"].wall
        peak = torch.cuda.max_memory_allocated(setting.device) / MEGABYTE if setting.on_gpu else None
    rows = work.config.batch.micro_rows
    used = use_of_peak(setting, seconds, utilisation=flops)
    return {"rows": rows, "step_ms": seconds * 1e3, "rows_per_second": rows / seconds, "peak_mb": peak, **used}


def from_fp32(setting: Setting, layout: str, way: Way) -> Figures:
    """How far a short run with bf16 weights is from one in fp32; autocast is beside it."""

    def work(precision: Literal["fp32", "bf16"], way: Way) -> Workload:
        rows = 2 if setting.small else 16
        made = text(setting, setting.checked, rows=rows, accumulation=2, precision=precision, lr=1e-3)
        return set_way(made, way)

    exact = train(setting, "plain", work("fp32", {}))
    autocast = apart(train(setting, "plain", work("bf16", {})), exact)
    ours = apart(train(setting, layout, work("bf16", way)), exact)
    return {**ours, **{f"autocast_{name}": value for name, value in autocast.items()}}


def unpadded(setting: Setting) -> Figures:
    """A step over rows that end early, of the places that are listed over whole rows; and how far their losses are
    apart, over the loss, without dropout."""
    release_memory()
    work, _ = workload(setting, TEXT, WAYS["bf16 weights"])
    listed = ending_early(work.rows)
    with training(setting, "plain", replace(work, rows=listed)) as trainer:
        engine = trainer.engine
        engine.train(False)
        given = {"whole": without_list(listed).to(engine.device), "listed": listed.to(engine.device)}
        with torch.no_grad():
            losses = {name: trainer.objective(engine, batch).sums for name, batch in given.items()}
        engine.train(True)

        def step(batch: Batch) -> None:
            trainer.source = SameWindow([batch])
            trainer.train_step()

        steps = {"whole": partial(step, without_list(listed)), "listed": partial(step, listed)}
        measured = alternate(steps, rounds=setting.rounds)
    apart_by = (losses["listed"] - losses["whole"]).abs() / losses["whole"].abs().clamp(min=1.0)
    return {
        "rows": len(listed.keys),
        "kept_places": len(listed["kept"]) / listed["tokens"].numel(),
        "listed_over_whole": measured["listed"].wall / measured["whole"].wall,
        "whole_step_ms": measured["whole"].wall * 1e3,
        "losses_apart": float(apart_by.max()),
    }


def ways(setting: Setting) -> Iterator[Item]:
    """BERT-base and MAE ViT-B in each way; what compiling takes comes last."""
    yield Item(name=f"{TEXT}, padding left out", measure=partial(unpadded, setting), seconds=10, timed=True)
    for name, (layout, way) in COMPARED.items():
        yield Item(name=f"{name}, from fp32", measure=partial(from_fp32, setting, layout, way), seconds=10)
    for name, way in WAYS.items():
        compiled = "compile" in way
        for model in ROWS:
            yield Item(
                name=f"{model}, {name}",
                measure=partial(speed, setting, model, way),
                seconds=25 if compiled else 8,
                timed=True,
                lacking=setting.no_gpu and f"torch.compile is measured on a GPU only: {setting.no_gpu}"
                if compiled
                else "",
            )


@contextmanager
def products(kind: Literal["highest", "high"]) -> Iterator[None]:
    """Of fp32 matrices: highest is fp32, high is TF32."""
    torch.set_float32_matmul_precision(kind)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def masks_over_plain(setting: Setting) -> Figures:
    """A step of the encoder with masks learned at every step (mlo_mae_imagenet's settings) over one of plain MAE, with
    forwards of the difference in fp32 and in TF32; and the same ratio of counted arithmetic."""
    rows = 2 if setting.small else 64
    plain = image_config(setting, "mae_vit_b", size="base", rows=rows)
    config = image_config(setting, "mae_vit_b", size="base", rows=rows)
    config.multilevel = make_settings("multilevel", "head", unroll=1, every=1, network="flattened")
    engines = plain_engines(setting.device)
    steps: dict[str, Callable[[], object]] = {
        "plain": masks_trainer(plain, rows, engines).train_step,
        "learned": cycle(config, masks_trainer(config, rows, engines)),
    }
    figures: Figures = {"images": rows}
    kinds: dict[str, Literal["highest", "high"]] = {"fp32": "highest", "tf32": "high"}
    counted = model_flops(config) / model_flops(plain)
    for name, kind in kinds.items():
        with products(kind):
            measured = alternate(steps, rounds=setting.rounds, warmup=2)
        over = measured["learned"].wall / cycle_steps(config) / measured["plain"].wall
        figures |= {f"{name}_over_plain": over, f"{name}_over_counted": over / counted}
    return figures | {"plain_step_ms": measured["plain"].wall * 1e3, "counted_over_plain": counted}


def masks(setting: Setting) -> Iterator[Item]:
    yield Item(name="learned masks over plain MAE", measure=partial(masks_over_plain, setting), seconds=40, timed=True)


STEPS, SHOWN, NAME = 3, 12, 70
MODELS = (TEXT, IMAGES, "AdPE ViT-B/16, relative positions", "MM-MAE ViT-B/16")
COMPUTED = ("bf16 weights", "bf16 weights, compiled blocks")


def kernels_workload(setting: Setting, model: str, way: Way) -> Workload:
    """What is trained, computed so."""
    rows = 2 if setting.small else 64
    if model.startswith("AdPE"):
        config = image_config(setting, "mae_plus_vit_b", size="base", rows=rows, kind="relative_coordinate")
        return set_way(mae_workload(config), way)
    if model.startswith("MM-MAE"):
        return set_way(mm_mae_workload(modality_config(setting, size="base", rows=rows)), way)
    return workload(setting, model, way)[0]


@dataclass(frozen=True)
class Profiled:
    """STEPS steps: how long they took, and by kernel (an operation where there is no GPU) its microseconds and how
    often it was started."""

    seconds: float
    times: dict[str, tuple[float, int]]

    @property
    def total(self) -> float:
        return sum(taken for taken, _ in self.times.values())


def profiled(setting: Setting, work: Workload) -> Profiled:
    """Steps of the whole loop on plain, in torch's profiler."""
    release_memory()
    kind = "CUDA" if setting.on_gpu else "CPU"
    with training(setting, "plain", work) as trainer:
        for _ in range(3):
            trainer.train_step()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if setting.on_gpu else [ProfilerActivity.CPU]
        if setting.on_gpu:
            torch.cuda.synchronize(setting.device)
        began = time.perf_counter()
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(STEPS):
                trainer.train_step()
            if setting.on_gpu:
                torch.cuda.synchronize(setting.device)
            seconds = time.perf_counter() - began
    times = {
        event.key: (event.self_device_time_total if setting.on_gpu else event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
        if event.device_type.name == kind and not getattr(event, "is_user_annotation", False)
    }
    return Profiled(seconds, times)


def costliest(setting: Setting, model: str, way: Way) -> Figures:
    """Kernels of STEPS steps by their share of the time in kernels, and by how often they are started; `busy` is that
    time over the steps' own."""
    if "compile" in way:
        torch._dynamo.reset()
    found = profiled(setting, kernels_workload(setting, model, way))
    by_time, by_count = (sorted(found.times.items(), key=lambda item: -item[1][at])[:SHOWN] for at in (0, 1))
    return {
        "step_ms": found.seconds / STEPS * 1e3,
        "busy": found.total / 1e6 / found.seconds,
        "kernels_a_step": sum(count for _, count in found.times.values()) / STEPS,
        "kernels": [f"{taken / found.total:.3f} {count / STEPS:.0f}x {key[:NAME]}" for key, (taken, count) in by_time],
        "most_often": [
            f"{count / STEPS:.0f}x {taken / found.total:.3f} {key[:NAME]}" for key, (taken, count) in by_count
        ],
    }


def added(setting: Setting, kind: str) -> Figures:
    """Time in kernels of AdPE's step over that of MAE+ with the same positions, ViT-B; the kernels whose time differs
    most, with the difference in milliseconds and in how often they are started, a step."""
    rows = 2 if setting.small else 256
    with_and_without = []
    for name in (kind, "none"):
        config = image_config(setting, "mae_plus_vit_b", size="base", rows=rows, kind=kind)
        config.adversary = make_settings("adversary", name)
        with_and_without.append(profiled(setting, mae_workload(config)))
    more, less = with_and_without
    absent = (0.0, 0)
    apart = {
        key: tuple(a - b for a, b in zip(more.times.get(key, absent), less.times.get(key, absent), strict=True))
        for key in more.times.keys() | less.times.keys()
    }
    largest = sorted(apart.items(), key=lambda item: -abs(item[1][0]))[: 2 * SHOWN]
    return {
        "images": rows,
        "mae_plus_kernels_ms": less.total / STEPS / 1e3,
        "adpe_kernels_ms": more.total / STEPS / 1e3,
        "kernels_over": more.total / less.total,
        "kernels": [
            f"{taken / STEPS / 1e3:+.3f} ms {count / STEPS:+.0f}x {key[:NAME]}" for key, (taken, count) in largest
        ],
    }


def kernels(setting: Setting) -> Iterator[Item]:
    """What an adversary adds; then each model, as PyTorch runs it and compiled."""
    for kind in ADVERSARIES:
        yield Item(name=f"AdPE over MAE+, {kind}", measure=partial(added, setting, kind), seconds=15, timed=True)
    for name in COMPUTED:
        way = WAYS[name]
        compiled = "compile" in way
        for model in MODELS:
            yield Item(
                name=f"{model}, {name}",
                measure=partial(costliest, setting, model, way),
                seconds=40 if compiled else 10,
                timed=True,
                lacking=setting.no_gpu if compiled else "",
            )
