"""Steps of a small run as the loop would report them."""

from __future__ import annotations

from typing import Any

from trp_scale.training.metrics import StepRecord, TaskRecord

TASKS = ("noun", "verb", "other")


def record(step: int, **changes: Any) -> StepRecord:
    """Step `step` of a run whose losses fall by 0.1 a step; `noun` is the worst task, `other` is larger but outside."""
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - 0.1 * step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tasks": {
            "noun": TaskRecord(loss=6.0 - 0.1 * step, weight=0.75, count=30),
            "verb": TaskRecord(loss=4.0 - 0.1 * step, weight=0.25, count=10),
            "other": TaskRecord(loss=9.0, weight=0.1, count=5),
        },
        "step_seconds": 0.5,
        "processor_seconds": 0.75,
        "data_wait_seconds": 0.1,
    }
    return StepRecord(**(values | changes))
