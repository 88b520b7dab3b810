"""Section of benchmarks/gpu.py on where a step's time goes: kernels by share, and how long the GPU is idle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_images import ADVERSARIES, image_config, modality_config
from benchmarks.gpu_setting import Figures, Item, Setting, release_memory, training
from benchmarks.gpu_ways import TEXT, WAYS, Way, set_way, workload
from benchmarks.image_steps import mae_workload, mm_mae_workload
from benchmarks.steps import Workload
from trp_scale.config.registry import make_settings

STEPS, SHOWN, NAME = 3, 12, 70
MODELS = (TEXT, "MAE ViT-B/16", "AdPE ViT-B/16, relative positions", "MM-MAE ViT-B/16")
COMPUTED = ("bf16 weights", "bf16 weights, compiled blocks")


def work_of(setting: Setting, model: str, way: Way) -> Workload:
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
    if way.compile != "none":
        torch._dynamo.reset()
    found = profiled(setting, work_of(setting, model, way))
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
        compiled = way.compile != "none"
        for model in MODELS:
            yield Item(
                name=f"{model}, {name}",
                measure=partial(costliest, setting, model, way),
                seconds=40 if compiled else 10,
                timed=True,
                lacking=setting.no_gpu if compiled else "",
            )
