"""Records that the loop passes to the observer: plain Python numbers, already summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FINISHED = "finished"
"""Why a run ended that made all its steps."""

NO_BETTER = "no better "
"""How the reason begins for which a run ends before its last step, with nothing left to do."""


def nothing_left(why: str) -> bool:
    """Whether a run that ended so is over: its steps are made, or patience has ended it."""
    return why == FINISHED or why.startswith(NO_BETTER)


@dataclass(kw_only=True)
class TaskRecord:
    """One task in one step.

    Attributes:
        loss: mean over the task's elements of the global batch; None where it had none.
        weight: weight of that mean in the total loss.
        count: number of its elements in the global batch.
    """

    loss: float | None
    weight: float
    count: int


@dataclass(kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: steps done, this one included: the first is 1, as in a checkpoint's name.
        loss: total loss of the global batch.
        lr: learning rate of the step.
        grad_norm: norm of the gradient before clipping.
        tasks: every task of the objective, absent ones with loss None and count 0.
        step_seconds: time of the whole step, waiting for data included.
        processor_seconds: that rank 0's process used in it, its threads together.
        data_wait_seconds: of step_seconds, what rank 0 spent waiting for the loader, in the loop and in hooks.
        applied: False when the step was skipped because its loss or gradient was not finite.
        hooks: one object per hook under the hook's name; may be empty on steps that `Observer.wants` does not ask for.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tasks: Mapping[str, TaskRecord]
    step_seconds: float
    processor_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    applied: bool = True
    hooks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(kw_only=True)
class RunInfo:
    """Constants of a run that its figures need.

    Attributes:
        positions_per_step: sequence positions of one step on all ranks, padding included: rows x length.
        images_per_step: of one step on all ranks; 0 where rows are no images.
        flops_per_step: model FLOPs of one training step on all ranks (3 x forward, no recomputation); 0 = not known.
        devices: number of ranks.
        device_name: as torch names it, or "cpu".
        outside_tasks: tasks that take no part in the maximum; never marked as the worst.
        start_step: steps done before this process began (a resumed run).
        rows: rows of each source: of an epoch, or of a pass over what is held out.
        workers, workers_asked: loader processes of rank 0, and how many --data.workers is.
        shown: names of each hook's metrics that the display shows.
        description: one line for the head of the display and the report, such as "deepspeed, ZeRO 2, 2 ranks, fp32".
    """

    positions_per_step: int
    images_per_step: int = 0
    flops_per_step: float = 0.0
    devices: int = 1
    device_name: str = "cpu"
    outside_tasks: tuple[str, ...] = ()
    start_step: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    workers: int = 0
    workers_asked: int = 0
    shown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""

    def image_count(self, positions: float) -> float:
        """Images that so many positions are."""
        return positions * self.images_per_step / self.positions_per_step
