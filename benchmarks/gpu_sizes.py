"""The best micro-batch of those tried on a GPU, for the sections of benchmarks/gpu.py on speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from benchmarks.gpu_items import MEGABYTE, Missing, Value, release_memory
from benchmarks.gpu_setting import NEEDS_GPU, Setting
from benchmarks.rounds import alternate
from trp_scale.models.flops import peak_flops
from trp_scale.training.loop import Trainer

WORTH_GOING_ON = 1.02
"""The search stops when a larger micro-batch gains less than this."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """What a search found.

    Attributes:
        rows: of the micro-batch with the highest rate.
        seconds: of its step.
        figures: these, every size that was tried, and memory.
    """

    rows: int
    seconds: float
    figures: dict[str, Value | Missing]


def best_size(
    setting: Setting, tried: Sequence[int], trainer_of: Callable[[int], AbstractContextManager[Trainer]]
) -> Best:
    """The number of rows, of those tried in this order, with the most rows per second; the search ends when the memory
    is full or the rate stands still.

    Args:
        trainer_of: with micro-batches of so many rows.

    Raises:
        RuntimeError: not even the first fits.
    """
    found: dict[int, tuple[float, float]] = {}
    tried = (2, 4) if setting.small else tried
    for rows in tried:
        try:
            with trainer_of(rows) as trainer:
                found[rows] = _timed(setting, trainer)
        except torch.OutOfMemoryError:
            break
        rates = [one / seconds for one, (seconds, _) in found.items()]
        if len(rates) > 1 and rates[-1] < WORTH_GOING_ON * max(rates[:-1]):
            break
    if not found:
        raise RuntimeError(f"{tried[0]} rows do not fit into the memory")
    rows = max(found, key=lambda one: one / found[one][0])
    seconds, memory = found[rows]
    figures: dict[str, Value | Missing] = {
        "rows": rows,
        "tried": [float(one) for one in found],
        "rates": [one / took for one, (took, _) in found.items()],
        "step_ms": seconds * 1e3,
        "rows_per_second": rows / seconds,
        "peak_mb": memory if setting.on_gpu else Missing(NEEDS_GPU),
    }
    return Best(rows=rows, seconds=seconds, figures=figures)


def use_of_peak(setting: Setting, seconds: float, **flops: float) -> dict[str, Value | Missing]:
    """Each of these numbers of FLOPs in so many seconds, as a share of what the device can do in bf16."""
    peak = peak_flops(setting.device_name, "bf16")
    unknown = Missing(f"no peak arithmetic is known for {setting.device_name}")
    return {name: count / seconds / peak if peak else unknown for name, count in flops.items()}


def _timed(setting: Setting, trainer: Trainer) -> tuple[float, float]:
    """Seconds of a step, and the most memory in MB that was allocated meanwhile, weights and moments included."""
    if setting.on_gpu:
        release_memory()
        torch.cuda.reset_peak_memory_stats(setting.device)
    seconds = alternate({"step": trainer.train_step}, rounds=2 if setting.small else 5)["step"].wall
    memory = torch.cuda.max_memory_allocated(setting.device) / MEGABYTE if setting.on_gpu else 0.0
    return seconds, memory
