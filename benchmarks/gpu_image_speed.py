"""Images per second on a GPU: the best micro-batch of those tried, for the sections of benchmarks/gpu.py on images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from benchmarks.gpu_items import Missing, Value, release_memory
from benchmarks.gpu_memory import MEGABYTE
from benchmarks.gpu_setting import NEEDS_GPU, Setting
from benchmarks.gpu_speed import WORTH_GOING_ON
from benchmarks.rounds import alternate
from trp_scale.observe.throughput import peak_flops
from trp_scale.training.loop import Trainer


def best_speed(
    setting: Setting,
    tried: Sequence[int],
    trainer_of: Callable[[int], AbstractContextManager[Trainer]],
    flops: Callable[[int, bool], float],
) -> dict[str, Value | Missing]:
    """The figures at that number of images, of those tried, with the most images per second.

    Args:
        trainer_of: with micro-batches of so many images.
        flops: of a step with so many images, model FLOPs or what is computed.
    """
    found: dict[int, tuple[float, float]] = {}
    tried = (2, 4) if setting.small else tried
    for rows in tried:
        try:
            with trainer_of(rows) as trainer:
                found[rows] = timed(setting, trainer)
        except torch.OutOfMemoryError:
            break
        rates = [one / seconds for one, (seconds, _) in found.items()]
        if len(rates) > 1 and rates[-1] < WORTH_GOING_ON * max(rates[:-1]):
            break
    if not found:
        raise RuntimeError(f"{tried[0]} images do not fit into the memory")
    rows = max(found, key=lambda one: one / found[one][0])
    seconds, memory = found[rows]
    peak = peak_flops(setting.device_name, "bf16")
    unknown = Missing(f"no peak arithmetic is known for {setting.device_name}")
    return {
        "images": rows,
        "tried": [float(one) for one in found],
        "rates": [one / took for one, (took, _) in found.items()],
        "step_ms": seconds * 1e3,
        "images_per_second": rows / seconds,
        "peak_mb": memory if setting.on_gpu else Missing(NEEDS_GPU),
        "utilisation": flops(rows, False) / seconds / peak if peak else unknown,
        "computed_utilisation": flops(rows, True) / seconds / peak if peak else unknown,
    }


def timed(setting: Setting, trainer: Trainer) -> tuple[float, float]:
    """Seconds of a step, and the most memory in MB that was allocated meanwhile, weights and moments included."""
    if setting.on_gpu:
        release_memory()
        torch.cuda.reset_peak_memory_stats(setting.device)
    seconds = alternate({"step": trainer.train_step}, rounds=2 if setting.small else 5)["step"].wall
    memory = torch.cuda.max_memory_allocated(setting.device) / MEGABYTE if setting.on_gpu else 0.0
    return seconds, memory
