"""The things that travel between the parts: a batch of rows, the losses of its tasks, what a step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, NewType, Protocol

import torch
from torch import Tensor

Extra = NewType("Extra", str)
"""Key of what a hook adds to batches. Who adds it and who reads it import the same key; a bare string is none."""

KEYS = "keys"
"""Name of a batch's keys among its tensors."""


class FieldLayout(NamedTuple):
    """Where a tensor lies in a buffer. Attributes: dtype: it has; wire: in the buffer; first: byte."""

    name: str
    dtype: torch.dtype
    wire: torch.dtype
    shape: tuple[int, ...]
    first: int


@dataclass(frozen=True, kw_only=True)
class Wire:
    """All tensors of a batch in one buffer: what a loader's worker hands over, and what a GPU gets, in one piece.

    Attributes:
        buffer: [bytes] uint8.
        layout: of the tensors, each aligned to ALIGNMENT; the last one is the keys.
        fields: the batch's, read out of the buffer on the host.
    """

    buffer: Tensor
    layout: list[FieldLayout]
    fields: dict[str, Tensor] | None = None

    def read(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors, with the types that they had: views of a buffer like this one's, but for narrowed integers."""
        tensors = {}
        for name, dtype, wire, shape, first in self.layout:
            flat = buffer[first : first + wire.itemsize * prod(shape)]
            tensors[name] = flat.view(wire).view(shape).to(dtype)
        return tensors


ALIGNMENT = 16
"""Bytes; kernels that read wide ask for it."""
PADDING = torch.zeros(ALIGNMENT, dtype=torch.uint8)


def narrowest(tensor: Tensor) -> torch.dtype:
    """The smallest type that holds the values of int64; other tensors keep theirs."""
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
    copy.record_stream(present)  # its memory is of the other stream, which must not give it away while it is read here
    return copy


@dataclass(kw_only=True)
class Batch:
    """Rows of one micro-batch.

    Attributes:
        fields: model inputs and labels by name; each tensor's first dimension is rows, [R, ...], but of text
            whose short rows share sequences (finetuning/glue/batch.py).
        keys: row keys, [R] int64, stable names of the rows in their data set.
        start: position of the first row in its source's global order.
        epoch: epoch of the first row.
        corrupt: keys of blocks that could not be read; their rows carry no elements (all label weights are 0).
        reasons: why not, by key, as far as it is known.
        fetch_seconds: time the loader spent to make this batch, in seconds.
        cache_use: what the loader's process has done with the cache of remote tars since its last batch, by the fields
            of `CacheUse`; empty where it has none.
        joined: it comes from another source than the window's own, for a task of its own; hooks that change what the
            model sees of the window leave it as it is.
        extras: what hooks add for the model's forward pass; not by row, such as a perturbation.
        wire: keys and fields in one buffer, where a loader has packed them.
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
        """Return the batch with these extras added."""
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
        """Return the batch with all tensors in one buffer, integers in the fewest bytes."""
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
        # Shared here, not by the thread that feeds the queue: there an error would be lost with the batch.
        buffer = torch.cat(parts).share_memory_()  # type: ignore[no-untyped-call]
        return replace(self, fields={}, keys=torch.empty(0), wire=Wire(buffer=buffer, layout=layout))

    def pin_memory(self) -> Batch:
        """A packed batch where a GPU can copy it from by itself. Called by torch's DataLoader."""
        assert self.wire is not None, "packed() comes first"
        return replace(self, wire=replace(self.wire, buffer=self.wire.buffer.pin_memory()))

    def unpack(self) -> Batch:
        """A packed batch as it was before."""
        assert self.wire is not None, "packed() comes first"
        fields = self.wire.read(self.wire.buffer)
        return replace(self, keys=fields.pop(KEYS), fields=fields, wire=replace(self.wire, fields=fields))


@dataclass(kw_only=True)
class TaskLosses:
    """Loss sums and element counts of every task: never means, so that they add over micro-batches and ranks.

    Attributes:
        sums: [T] float64, sum over the elements of each task; carries the graph.
        counts: [T] float64, number of elements.
        shared_inputs: [rows, K] without a graph, what entered the last layer that the tasks share, in the precision
            that the layer computes in; only where a tap asked for it (core/objective.py).
        hits: [T] float64, number of elements whose most probable answer is right; None where that is not known, and
            in training.
    """

    sums: Tensor
    counts: Tensor
    shared_inputs: Tensor | None = None
    hits: Tensor | None = None


@dataclass(kw_only=True)
class StepStats:
    """Result of the end of a step, as numbers on the host.

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
        head = torch.stack([number.to(torch.float64) for number in (applied, grad_norm, loss)])
        self._values = torch.cat([head, means, weights, counts])
        self._arrived: torch.cuda.Event | None = None
        self._read: StepStats | None = None
        if self._values.is_cuda:
            on_device = self._values
            self._values = torch.empty_like(on_device, device="cpu", pin_memory=True)
            self._values.copy_(on_device, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def has_arrived(self) -> bool:
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
