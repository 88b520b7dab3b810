"""The objective: turns a batch and the model into task losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.engine import Trains


class Objective(Protocol):
    """Tasks of a run and how their losses are computed.

    Attributes:
        tasks: names, in the order of every [T] vector.
        balanced: positions of the tasks whose weights the balancer decides.
        regression: positions of the tasks whose loss is a distance, not a cross-entropy.
        in_a_graph: whether a call can be one graph with the model's forward pass (`training.compile: whole`): it asks
            the host for no number, waits for no other rank, and its shapes stay.
    """

    tasks: tuple[str, ...]
    balanced: tuple[int, ...]
    regression: tuple[int, ...]
    in_a_graph: bool

    def count(self, batch: Batch) -> Tensor:
        """[T] float64, elements of each task in the batch; from the labels alone, before any forward pass."""
        ...

    def outside_weights(self, counts: Tensor) -> Tensor:
        """[T] float64, weights of the tasks outside the balance given the global counts; 0 for balanced tasks."""
        ...

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Run the model and sum each task's losses."""
        ...


def task_losses(objective: Objective, engine: Trains, batch: Batch) -> TaskLosses:
    """The objective's losses of a batch, from the engine's compiled graph where they are part of it."""
    if engine.graphs is None:
        return objective(engine, batch)
    return engine.graphs.losses(objective, engine, batch)


TapPlace = Literal["weights", "representation"]
"""Where tasks are told apart: at the output of the last layer whose weights they share, or at what they share."""


class Tap(NamedTuple):
    """A tensor of zeros that the model adds where the tasks branch from what they share: after the backward pass its
    `.grad` holds the tasks' gradients there, which no other graph or pass has to give.

    Attributes:
        key: under which it goes into `Batch.extras`.
        shape: what the model expects for this batch.
    """

    key: Extra
    shape: tuple[int, ...]


@runtime_checkable
class TappedObjective(Objective, Protocol):
    """An objective whose tasks' gradients can be told apart where they branch."""

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        """Positions of the tasks that pass this place."""
        ...

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """The tap for one micro-batch; with `at` = weights the losses then hold `shared_inputs`."""
        ...

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """Each tapped task's part of a tap's gradient, [rows, D], by position.

        With `at` = weights its rows are those of `shared_inputs`, so that (part^T shared_inputs) [D, K] is the task's
        gradient of the shared layer's weights.
        """
        ...


PATCH_WEIGHTS = Extra("patch_weights")
"""[R, k, M] weight of each masked patch's error; 1 where it is not given."""
GATE = Extra("gate")
"""[R, k, V] factor of each visible patch's token, 1 in value: a derivative of the choice of patches goes through it."""


class PatchObjective(Objective, Protocol):
    """An objective on masked patches of images, whose masks and weights a hook may replace (MLO-MAE eq. 1)."""

    def patches(self, batch: Batch, pixel_shift: Tensor | None = None) -> Tensor:
        """[B, N, P] patches of the batch's crops."""
        ...

    def errors(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """[R, k, M] error of each masked patch."""
        ...

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """The sums for given errors, linear in them, and in PATCH_WEIGHTS of the batch."""
        ...
