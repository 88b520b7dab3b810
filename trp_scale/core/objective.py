"""The objective: computes task losses from a batch with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.engine import Trains


class Objective(Protocol):
    """Tasks of a run and their losses.

    Attributes:
        tasks: names, in the order of every [T] vector.
        balanced: indices of the tasks with weights from the balancer.
        regression: indices of the tasks whose loss is a distance, not a cross-entropy.
        in_a_graph: whether a call can be one graph with the model's forward pass (`training.compile: whole`): it reads
            no number on the host, has no collective, and static shapes.
    """

    tasks: tuple[str, ...]
    balanced: tuple[int, ...]
    regression: tuple[int, ...]
    in_a_graph: bool

    def count(self, batch: Batch) -> Tensor:
        """Return the elements of each task in the batch, [T] float64, from the labels alone."""
        ...

    def outside_weights(self, counts: Tensor) -> Tensor:
        """Return the weights of the tasks that are not balanced, [T] float64, for the global counts; 0 for balanced
        tasks."""
        ...

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Run the model and sum each task's losses."""
        ...


def task_losses(objective: Objective, engine: Trains, batch: Batch) -> TaskLosses:
    """Compute the losses of a batch, with the engine's compiled graph if it includes them."""
    if engine.graphs is None:
        return objective(engine, batch)
    return engine.graphs.losses(objective, engine, batch)


TapPlace = Literal["weights", "representation"]
"""Position of a tap: output of the last layer with shared weights, or the shared representation."""


class Tap(NamedTuple):
    """Tensor of zeros that the model adds where the tasks branch. After the backward pass its `.grad` has the tasks'
    gradients there, without a further graph or pass.

    Attributes:
        key: key in `Batch.extras`.
        shape: shape for this batch.
    """

    key: Extra
    shape: tuple[int, ...]


@runtime_checkable
class TappedObjective(Objective, Protocol):
    """Objective with separate gradients of the tasks where they branch."""

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        """Return the indices of the tasks that use this tap."""
        ...

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """Return the tap for a micro-batch; with `at` = weights the losses then have `shared_inputs`."""
        ...

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """Return each task's part of a tap's gradient, [rows, D], by index.

        With `at` = weights the rows are those of `shared_inputs`: (part^T shared_inputs) [D, K] is the task's gradient
        of the shared layer's weights.
        """
        ...


PATCH_WEIGHTS = Extra("patch_weights")
"""[R, k, M] weight of each masked patch's error; 1 if absent."""
GATE = Extra("gate")
"""[R, k, V] factor of each visible patch's token, with value 1: it has the derivative of the choice of patches."""


class PatchObjective(Objective, Protocol):
    """Objective on masked patches of images; a hook may replace masks and weights (MLO-MAE eq. 1)."""

    def patches(self, batch: Batch, pixel_shift: Tensor | None = None) -> Tensor:
        """Return the patches of the batch's crops, [B, N, P]."""
        ...

    def errors(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the error of each masked patch, [R, k, M]."""
        ...

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """Return the loss sums, linear in the errors and in the batch's PATCH_WEIGHTS."""
        ...
