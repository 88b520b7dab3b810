"""Data types between the parts of a run: a batch, the losses of its tasks, the statistics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, NewType, Protocol

import torch
from torch import Tensor

Extra = NewType("Extra", str)
"""Key of a tensor that a hook adds to batches. Writer and reader import the same key."""

KEYS = "keys"
"""Name of a batch's keys among its tensors."""


class FieldLayout(NamedTuple):
    """Position of a tensor in a buffer. `dtype`: its type; `wire`: its type in the buffer; `first`: first byte."""

    name: str
    dtype: torch.dtype
    wire: torch.dtype
    shape: tuple[int, ...]
    first: int


@dataclass(frozen=True, kw_only=True)
class Wire:
    """All tensors of a batch in one buffer, for the transfer from a loader worker and to a GPU.

    Attributes:
        buffer: [bytes] uint8.
        layout: positions of the tensors, aligned to ALIGNMENT; the keys are last.
        fields: the batch's fields, read from the buffer on the host.
    """

    buffer: Tensor
    layout: list[FieldLayout]
    fields: dict[str, Tensor] | None = None

    def read(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors with their original types: views of `buffer`, or copies of narrowed integers."""
        tensors = {}
        for name, dtype, wire, shape, first in self.layout:
            flat = buffer[first : first + wire.itemsize * prod(shape)]
            tensors[name] = flat.view(wire).view(shape).to(dtype)
        return tensors


ALIGNMENT = 16
"""Bytes; vectorised kernels need it."""
PADDING = torch.zeros(ALIGNMENT, dtype=torch.uint8)


def narrowest(tensor: Tensor) -> torch.dtype:
    """Return the smallest integer type for the values of an int64 tensor; the type of other tensors."""
    if tensor.dtype != torch.int64 or tensor.numel() == 0:
        return tensor.dtype
    low, high = (int(value) for value in tensor.aminmax())
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


_streams: dict[torch.device, torch.cuda.Stream] = {}


def copy_to_device(buffer: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, on a GPU on a side stream; later work on the current stream waits for the copy."""
    if device.type != "cuda":
        return buffer.to(device)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream, present = _streams[device], torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copy = buffer.to(device, non_blocking=True)
    present.wait_stream(stream)
    copy.record_stream(present)  # the side stream must not reuse its memory while it is read here
    return copy


@dataclass(kw_only=True)
class Batch:
    """Rows of one micro-batch.

    Attributes:
        fields: model inputs and labels by name, [R, ...], R rows; other shapes for text with packed short rows
            (finetuning/glue/batch.py).
        keys: row keys, [R] int64, stable ids of the rows in their data set.
        start: position of the first row in its source's global order.
        epoch: epoch of the first row.
        corrupt: keys of unreadable blocks; their rows have no elements (all label weights are 0).
        reasons: reasons by key, as far as known.
        fetch_seconds: time in seconds that the loader needed for this batch.
        cache_use: use of the cache of remote tars by the loader's process since its last batch, by the fields of
            `CacheUse`; empty without a cache.
        joined: from another source, for an additional task; hooks that change the window's inputs skip it.
        extras: tensors that hooks add for the forward pass, such as a perturbation; not by row.
        wire: keys and fields in one buffer, if a loader has packed them.
    """

    fields: dict[str, Tensor]
    keys: Tensor
    start: int
    epoch: int = 0
    corrupt: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    fetch_seconds: float = 0.0
    cache_use: tuple[int, ...] = ()
    joined: bool = False
    extras: dict[Extra, Tensor] = field(default_factory=dict)
    wire: Wire | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def rows(self) -> int:
        return int(self.keys.shape[0])

    def adding(self, extras: Mapping[Extra, Tensor]) -> Batch:
        """Return the batch with further extras."""
        return replace(self, extras={**self.extras, **extras})

    def to(self, device: torch.device) -> Batch:
        """Copy the batch's fields to `device`; keys stay on the host."""
        if device.type == "cpu":
            return self
        if self.wire is not None and self.wire.fields is self.fields:
            fields = self.wire.read(copy_to_device(self.wire.buffer, device))
            del fields[KEYS]
        else:
            fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return replace(self, fields=fields, wire=None)

    def pack(self) -> Batch:
        """Return the batch with all tensors in one buffer, integers in the smallest type."""
        layout: list[FieldLayout] = []
        parts: list[Tensor] = []
        size = 0
        for name, tensor in (*self.fields.items(), (KEYS, self.keys)):
            wire = narrowest(tensor)
            parts.append(tensor.to(wire).contiguous().view(-1).view(torch.uint8))
            layout.append(FieldLayout(name, tensor.dtype, wire, tuple(tensor.shape), size))
            size += (size_of_part := parts[-1].numel())
            if rest := -size_of_part % ALIGNMENT:
                parts.append(PADDING[:rest])
                size += rest
        # Shared here, not in the thread that feeds the queue: that thread would lose an error with the batch.
        buffer = torch.cat(parts).share_memory_()  # type: ignore[no-untyped-call]
        return replace(self, fields={}, keys=torch.empty(0), wire=Wire(buffer=buffer, layout=layout))

    def pin_memory(self) -> Batch:
        """Return a packed batch in pinned memory. Called by torch's DataLoader."""
        assert self.wire is not None, "packed() comes first"
        return replace(self, wire=replace(self.wire, buffer=self.wire.buffer.pin_memory()))

    def unpack(self) -> Batch:
        """Return a packed batch with its fields and keys."""
        assert self.wire is not None, "packed() comes first"
        fields = self.wire.read(self.wire.buffer)
        return replace(self, keys=fields.pop(KEYS), fields=fields, wire=replace(self.wire, fields=fields))


def membership(numbers: Tensor, count: int) -> Tensor:
    """Return [..., count] float64, 1 in the column of each entry of `numbers`. bincount would wait for the GPU."""
    return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).double()


@dataclass(kw_only=True)
class TaskLosses:
    """Loss sums and element counts of every task, not means, so that they add over micro-batches and ranks.

    Attributes:
        sums: [T] float64, sum over the elements of each task, with the autograd graph.
        counts: [T] float64, number of elements.
        shared_inputs: [rows, K] detached inputs of the last layer that the tasks share, in its compute precision; only
            with a tap (core/run.py).
        hits: [T] float64, number of elements with a correct prediction; None if unknown, and in training.
    """

    sums: Tensor
    counts: Tensor
    shared_inputs: Tensor | None = None
    hits: Tensor | None = None


@dataclass(kw_only=True)
class StepStats:
    """Statistics of a step, as numbers on the host.

    Attributes:
        applied: False if all ranks skipped the step (loss or gradient not finite, or a spike).
        grad_norm: norm of the whole model's gradient before clipping.
        loss: total loss of the global batch.
        lr: learning rate of the step.
        task_losses: mean loss of each task over the global batch; 0 for absent tasks.
        task_weights: weight of each mean in the total loss.
        task_counts: elements of each task in the global batch.
    """

    applied: bool
    grad_norm: float
    loss: float
    lr: float
    task_losses: tuple[float, ...] = ()
    task_weights: tuple[float, ...] = ()
    task_counts: tuple[float, ...] = ()


class PendingTensor:
    """A tensor that is being copied to the host. The copy is queued after the work so far; only `read` waits."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def has_arrived(self) -> bool:
        """Return whether `read` returns without a wait."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


class LateStats:
    """StepStats that are being copied to the host. The copy is queued after the step's work; only `read` waits.

    Args:
        applied, grad_norm, loss: 0-dimensional, on the device.
        means, weights, counts: [T], on the device.
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
        head = torch.stack([number.to(torch.float64) for number in (applied, grad_norm, loss)])
        self._values = PendingTensor(torch.cat([head, means, weights, counts]))
        self._read: StepStats | None = None

    def has_arrived(self) -> bool:
        """Whether `read` returns without a wait."""
        return self._values.has_arrived()

    def read(self) -> StepStats:
        """Wait for the device and return the statistics."""
        if self._read is None:
            (applied, grad_norm, loss, *rest), tasks = self._values.read().tolist(), self.tasks
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
    """Source of global batches."""

    def next_window(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch."""
        ...
