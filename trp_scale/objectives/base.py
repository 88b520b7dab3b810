"""The objective: turns a batch and the model into task losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from trp_scale.batch import Batch, TaskLosses


class Objective(Protocol):
    """Tasks of a run and how their losses are computed.

    Attributes:
        tasks: names, in the order of every [T] vector.
        balanced: positions of the tasks whose weights the balancer decides.
    """

    tasks: tuple[str, ...]
    balanced: tuple[int, ...]

    def count(self, batch: Batch) -> Tensor:
        """[T] float64, elements of each task in the batch; from the labels alone, before any forward pass."""
        ...

    def outside_weights(self, counts: Tensor) -> Tensor:
        """[T] float64, weights of the tasks outside the balance given the global counts; 0 for balanced tasks."""
        ...

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Run the model and sum each task's losses."""
        ...
