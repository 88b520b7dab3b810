"""The things that travel between the parts: a batch of rows, the losses of its tasks, what a step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NewType, Protocol

import torch
from torch import Tensor

Extra = NewType("Extra", str)
"""Key of what a hook adds to batches. Who adds it and who reads it import the same key; a bare string is none."""


@dataclass(kw_only=True)
class Batch:
    """Rows of one micro-batch.

    Attributes:
        fields: model inputs and labels by name; each tensor's first dimension is rows, [R, ...], but of text
            whose short rows share sequences (downstream/glue/batch.py).
        keys: row keys, [R] int64, stable names of the rows in their data set.
        start: position of the first row in its source's global order.
        epoch: epoch of the first row.
        corrupt: keys of blocks that could not be read; their rows carry no elements (all label weights are 0).
        fetch_seconds: time the loader spent to make this batch, in seconds.
        joined: it comes from another source than the window's own, for a task of its own; hooks that change what the
            model sees of the window leave it as it is.
        extras: what hooks add for the model's forward pass; not by row, such as a perturbation.
    """

    fields: dict[str, Tensor]
    keys: Tensor
    start: int
    epoch: int = 0
    corrupt: list[str] = field(default_factory=list)
    fetch_seconds: float = 0.0
    joined: bool = False
    extras: dict[Extra, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def rows(self) -> int:
        return int(self.keys.shape[0])

    def adding(self, extras: Mapping[Extra, Tensor]) -> Batch:
        """The same batch with these extras beside those that it has."""
        return replace(self, extras={**self.extras, **extras})

    def to(self, device: torch.device) -> Batch:
        """The same batch with its fields on `device`; keys stay on the host."""
        if device.type == "cpu":
            return self
        return replace(self, fields={name: value.to(device, non_blocking=True) for name, value in self.fields.items()})

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader when the device is a GPU."""
        return replace(self, fields={name: value.pin_memory() for name, value in self.fields.items()})


@dataclass(kw_only=True)
class TaskLosses:
    """Loss sums and element counts of every task: never means, so that they add over micro-batches and ranks.

    Attributes:
        sums: [T] float64, sum over the elements of each task; carries the graph.
        counts: [T] float64, number of elements.
        shared_inputs: [rows, K] without a graph, what entered the last layer that the tasks share, in the precision
            that the layer computes in; only where a tap asked for it (core/objective.py).
    """

    sums: Tensor
    counts: Tensor
    shared_inputs: Tensor | None = None


@dataclass(kw_only=True)
class StepStats:
    """What the engine did at the end of a step, as numbers on the host.

    Attributes:
        applied: False when the step was skipped on all ranks because of a loss or gradient that is not finite.
        grad_norm: norm of the gradient of the whole model before clipping.
        loss: total loss of the global batch.
        lr: learning rate of the step.
        task_losses: mean loss of each task over the global batch; 0 where the task is absent.
        task_weights: weight of each of those means in the total loss.
        task_counts: elements of each task in the global batch.
    """

    applied: bool
    grad_norm: float
    loss: float
    lr: float
    task_losses: tuple[float, ...] = ()
    task_weights: tuple[float, ...] = ()
    task_counts: tuple[float, ...] = ()


class LateStats:
    """A step's StepStats on their way to the host. The copy is queued behind the step's work; only `read` waits.

    Args:
        applied, grad_norm, loss: 0-dimensional, on the device.
        means, weights, counts: [T] of the tasks, on the device.
        lr: learning rate of the step.
    """

    def __init__(
        self,
        *,
        applied: Tensor,
        grad_norm: Tensor,
        loss: Tensor,
        means: Tensor,
        weights: Tensor,
        counts: Tensor,
        lr: float,
    ) -> None:
        self.lr, self.tasks = lr, len(means)
        head = torch.stack([each.to(torch.float64) for each in (applied, grad_norm, loss)])
        self._values = torch.cat([head, means, weights, counts])
        self._arrived: torch.cuda.Event | None = None
        self._read: StepStats | None = None
        if self._values.is_cuda:
            on_device = self._values
            self._values = torch.empty_like(on_device, device="cpu", pin_memory=True)
            self._values.copy_(on_device, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepStats:
        """The numbers, once the device has made them."""
        if self._read is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            (applied, grad_norm, loss, *rest), tasks = self._values.tolist(), self.tasks
            self._read = StepStats(
                applied=bool(applied),
                grad_norm=grad_norm,
                loss=loss,
                lr=self.lr,
                task_losses=tuple(rest[:tasks]),
                task_weights=tuple(rest[tasks : 2 * tasks]),
                task_counts=tuple(rest[2 * tasks :]),
            )
        return self._read


class WindowSource(Protocol):
    """Where global batches come from."""

    def next_window(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch."""
        ...
