"""Data parallel: whole weights on every rank, gradients summed in buckets while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import Piece, owned_ranges, shares
from trp_scale.distributed.groups import Group
from trp_scale.engines.plain import PlainEngine
from trp_scale.engines.shards import sum_of_squares

BUCKET_BYTES = 25 << 20
"""Of gradients that are summed by one collective: large enough for a network's full rate, small enough that the first
is under way early in the backward pass."""


class Bucket:
    """Gradients that are summed together.

    Args:
        parameters: of one type, on one device.
    Attributes:
        flat: [elements] their gradients, one after the other.
        views: the part of `flat` of each parameter, in its shape.
        missing: parameters whose gradient this backward pass has not made yet.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first, sizes = parameters[0], [parameter.numel() for parameter in parameters]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = zip(torch.split(self.flat, sizes), parameters, strict=True)
        self.views = [part.view_as(parameter) for part, parameter in parts]
        self.missing = 0

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the gradients into `flat`, zeros where a parameter took no part in the window, and let them be views of
        it from here on: those that the backward pass made are let go of while it runs."""
        present = [(view, p.grad) for view, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if len(present) < len(self.parameters):
            self.flat.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def buckets_of(parameters: list[nn.Parameter], limit: int) -> list[Bucket]:
    """The parameters from last to first, as a backward pass makes their gradients: each bucket has at most `limit`
    bytes, or one parameter."""
    found: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        taken = parameter.numel() * parameter.element_size()
        if not found or size + taken > limit or found[-1][0].dtype != parameter.dtype:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += taken
    return [Bucket(members) for members in found]


class GradientReduction:
    """Sums the gradients of a window over the ranks during its last backward pass: a bucket as soon as all its
    gradients are there. Buckets go in one order on all ranks, whatever order their gradients come in.

    Written here since torch's DistributedDataParallel must know in the forward pass whether the backward pass will be
    the window's last, which the loop says later; and since it gives the ranks' mean, where losses add up to a sum.

    Args:
        parameters: the model's, in its order.
        group: the ranks that split the batch.
        limit: bytes of a bucket.
    """

    def __init__(self, parameters: list[nn.Parameter], group: Group, limit: int = BUCKET_BYTES) -> None:
        self.group = group
        self.buckets = buckets_of(parameters, limit)
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._next: int | None = None  # the bucket that goes next; None outside a window's last backward pass
        self._under_way: list[Any] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The window's last backward pass begins."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self._next = 0

    def _accumulated(self, parameter: Tensor) -> None:
        if self._next is None:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._send(self.buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        bucket.pack()
        self._under_way.append(dist.all_reduce(bucket.flat, group=self.group.handle, async_op=True))

    def finish(self) -> None:
        """After the backward pass: send what is left, such as the bucket of a parameter that it did not reach, and
        wait. On a GPU its stream waits, not the host."""
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for work in self._under_way:
            work.wait()
        self.drop()

    def drop(self) -> None:
        """The pass is over, or has failed."""
        self._next = None
        self._under_way.clear()


class DdpEngine(PlainEngine):
    """Weights and moments are whole on every rank; gradients are summed once a window. Every rank owns an equal range
    of each parameter, so that all write checkpoints."""

    name = "ddp"

    reduction: GradientReduction | None = None
    """None on one rank."""

    def place(self, module: nn.Module) -> nn.Module:
        module = module.to(self.device)
        if self.data_group.size > 1:
            if not dist.is_initialized():
                raise EngineError("--engine ddp needs a process group: start with torchrun or deepspeed")
            self.reduction = GradientReduction([p for p in module.parameters() if p.requires_grad], self.data_group)
        return module

    def backward(self, loss: Tensor, *, last: bool) -> None:
        reduction = self.reduction if last else None
        if reduction is not None:
            reduction.begin()
        super().backward(loss, last=last)
        if reduction is not None:
            reduction.finish()

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if self.reduction is not None:
            self.reduction.drop()

    def check_gradients(self) -> Tensor:
        self._norm = sum_of_squares(self._gradients(), self.device).sqrt()  # the same on all ranks
        return self._norm

    def loss_factor(self) -> float:
        return 1.0

    def pieces(self) -> Iterator[Piece]:
        for piece in super().pieces():
            group = self.data_group
            yield from owned_ranges(piece.name, piece.shape, piece.tensors, rank=group.rank, world=group.size)

    def piece_gradients(self) -> list[Tensor]:
        whole = super().piece_gradients()
        return [each[start:stop] for each in whole for start, stop in shares(each.numel(), self.data_group.size)]

    def full_weights(self) -> dict[str, Tensor]:
        return super().full_weights() if self.data_group.rank == 0 else {}
