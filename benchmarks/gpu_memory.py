"""Section of benchmarks/gpu.py on memory: what each engine holds on one rank at its worst and between steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_items import MEGABYTE, Figures, Item, release_memory
from benchmarks.gpu_setting import ENGINES, Setting, lacking, text, training
from benchmarks.memory import LAYOUTS

STEPS = 3


def state_bytes(layout: str) -> int:
    """Bytes of weights, gradients and moments a parameter, in fp32; for ZeRO-3 see benchmarks/memory.py."""
    return LAYOUTS[layout][2] if layout in LAYOUTS else LAYOUTS["plain"][2]


def peak(setting: Setting, layout: str) -> Figures:
    """Training steps in bf16 on an empty GPU, above what was allocated before."""
    release_memory()
    torch.cuda.reset_peak_memory_stats(setting.device)
    before = torch.cuda.memory_allocated(setting.device)
    rows = 2 if setting.small else 32
    with training(setting, layout, text(setting, setting.base, rows=rows)) as trainer:
        parameters = sum(getattr(one, "ds_numel", one.numel()) for one in trainer.engine.module.parameters())
        for _ in range(STEPS):
            trainer.train_step()
        torch.cuda.synchronize(setting.device)
        return {
            "rows": rows,
            "parameters": parameters,
            "peak_mb": (torch.cuda.max_memory_allocated(setting.device) - before) / MEGABYTE,
            "between_steps_mb": (torch.cuda.memory_allocated(setting.device) - before) / MEGABYTE,
            "states_alone_mb": state_bytes(layout) * parameters / MEGABYTE,
        }


def memory(setting: Setting) -> Iterator[Item]:
    """BERT-base on one rank: sharding saves nothing there; what an engine adds on top of plain is seen."""
    for layout in ENGINES:
        yield Item(
            name=layout,
            measure=partial(peak, setting, layout),
            seconds=12,
            lacking=setting.no_gpu or lacking(layout),
        )
