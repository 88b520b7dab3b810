"""Context of a run for balancers and other hooks; the objective, which computes task losses; seeds of tensors, equal on
every rank and engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trp_scale.config import Config
from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.engine import Engine, Trains
from trp_scale.distributed.groups import ALONE, Group


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
    in_a_graph: bool = True

    def count(self, batch: Batch) -> Tensor:
        """Return the elements of each task in the batch, [T] float64, from the labels alone."""
        ...

    def outside_weights(self, counts: Tensor) -> Tensor:
        """Return the weights of the tasks that are not balanced, [T] float64, for the global counts; 0 for balanced
        tasks, by default for all."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Run the model and sum each task's losses."""
        ...


def task_losses(objective: Objective, engine: Trains, batch: Batch) -> TaskLosses:
    """Compute the losses of a batch, with the engine's captured or compiled graph if it includes them."""
    if engine.captured_graphs is not None:
        return engine.captured_graphs.losses(objective, batch)
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
        """Return each task's part of a tap's gradient by index, all of one shape, [..., D].

        With `at` = weights the shape is [rows, D], with the rows of `shared_inputs`: (part^T shared_inputs) [D, K] is
        the task's gradient of the shared layer's weights.
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


def tensor_seed(seed: int, name: str) -> int:
    """Return the 63-bit seed of a tensor."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def reseed(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of this device. torch.manual_seed seeds all device types: without a GPU each
    call takes 3 ms, and is stored for a later start of a GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def per_member_rng(device: torch.device, member: int) -> Iterator[None]:
    """Context with a member-specific RNG; restores the shared state on exit.

    Its seed is the next number of the CPU's generator, so it depends only on the last `reseed` and the numbers drawn
    since; nothing waits for a device.
    """
    seed = int(torch.randint(1 << 62, (), generator=torch.default_generator))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        reseed(device, tensor_seed(seed, f"member/{member}"))
        yield


MakeEngine = Callable[[nn.Module, Config], Engine]
"""Wraps a second module, which a hook trains, in an engine of the run's kind with its own settings."""

MakeModel = Callable[[], nn.Module]
"""Builds another model like the run's, with its initial weights."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Constants of a run.

    Attributes:
        config: all settings.
        objective: the tasks.
        engine: engine of the model.
        world: all ranks.
        sources: named streams of rows (data/sources.py).
        make_engine, make_model: for modules that a hook trains in addition.
        steps_per_epoch: global batches of an epoch, rounded up; 0 = unknown.
    """

    config: Config
    objective: Objective
    engine: Engine
    world: Group = ALONE
    sources: Any = None
    make_engine: MakeEngine | None = None
    make_model: MakeModel | None = None
    steps_per_epoch: int = 0

    @property
    def device(self) -> torch.device:
        """Device of the model and of [T] vectors."""
        return self.engine.device

    @property
    def data_group(self) -> Group:
        """Ranks that split the global batch."""
        return self.engine.data_group

    @property
    def seed(self) -> int:
        """Only source of randomness: derive from (seed, step or row key), never from a generator's state."""
        return self.config.training.seed

    def reseed(self, name: str) -> None:
        """Seed the device's generator from (seed, name)."""
        reseed(self.device, tensor_seed(self.seed, name))
