"""Data parallel: whole weights on every rank, gradients summed in buckets while the backward pass still runs.

For engines/megatron.py the moments are sharded over the data ranks (ZeRO stage 1, Rajbhandari et al. 2020): each rank
updates some rows of every parameter. Gradients are reduce-scattered bucket by bucket, and the ranks all-gather the new
weights after the update. This sends the bytes of one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import Piece, owned_ranges, shares
from trp_scale.distributed.groups import Group
from trp_scale.engines.optimizer import MatrixOptimizer
from trp_scale.engines.plain import Masters, PlainEngine, take_gradients
from trp_scale.engines.shards import sum_of_squares
from trp_scale.models.initialise import fill_module

BUCKET_BYTES = 25 << 20
"""Bytes of gradients in a collective: large enough for the full network bandwidth, small enough that the first starts
early in the backward pass."""


@dataclass(frozen=True, slots=True)
class ReducedParameter:
    """Parameter of the backward pass (`read`) and of the optimizer (`own`): the same, or a rounded copy and its
    master."""

    read: nn.Parameter
    own: nn.Parameter


class Bucket:
    """Gradients that are summed in one collective.

    Args:
        members: on one device, with `own` of one type.
        dtype: type of the collective; None: that of `own`.
    Attributes:
        flat: [elements] concatenated gradients.
        views: view of `flat` for each member, in its shape.
        missing: members without a gradient so far in this backward pass.
    """

    def __init__(self, members: list[ReducedParameter], dtype: torch.dtype | None = None) -> None:
        self.members = members
        first, sizes = members[0].own, [member.own.numel() for member in members]
        self.flat = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
        self.views = self._split(self.flat)
        self.missing = 0

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [member.own.numel() for member in self.members])
        return [part.view_as(member.own) for part, member in zip(parts, self.members, strict=True)]

    def places(self, number: int, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of `flat`, and the parts of a member's gradient to copy there."""
        yield self.views[number], gradient

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the gradients into `flat`, zeros for members that the window did not use, and release them during the
        backward pass."""
        take_gradients((m.read, m.own) for m in self.members if m.read is not m.own and m.own.grad is not None)
        present: list[Tensor] = []
        places: list[Tensor] = []
        complete = True
        for number, member in enumerate(self.members):
            gradient = member.read.grad if member.own.grad is None else member.own.grad
            if gradient is None:
                complete = False
            else:
                for target, part in self.places(number, gradient):
                    places.append(target)
                    present.append(part)
            member.read.grad = member.own.grad = None
        if not complete:
            self.flat.zero_()
        if present:
            torch._foreach_copy_(places, present)

    def send(self, group: Group) -> Any:
        """Start the sum over the ranks; return the work to wait for."""
        return dist.all_reduce(self.flat, group=group.handle, async_op=True)

    def hand_out(self) -> None:
        """Set the optimizer's gradients after the sum, in the type of its parameters."""
        dtype = self.members[0].own.dtype
        views = self.views if self.flat.dtype == dtype else self._split(self.flat.to(dtype))
        for member, view in zip(self.members, views, strict=True):
            member.own.grad = view


def cut_into_buckets(
    members: Sequence[ReducedParameter],
    limit: int,
    dtype: torch.dtype | None = None,
    kind: Callable[[list[Any], torch.dtype | None], Bucket] = Bucket,
) -> list[Bucket]:
    """Split the members into buckets of at most `limit` bytes (or one member), from last to first, in the order of the
    backward pass."""
    buckets: list[list[ReducedParameter]] = []
    size = 0
    for member in reversed(members):
        taken = member.own.numel() * (dtype or member.own.dtype).itemsize
        if not buckets or size + taken > limit or buckets[-1][0].own.dtype != member.own.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(member)
        size += taken
    return [kind(some, dtype) for some in buckets]


class GradientReduction:
    """Sum of a window's gradients over the ranks, during its last backward pass: a bucket is sent when all its
    gradients exist, in the same order on all ranks.

    Not torch's DistributedDataParallel: it must know in the forward pass whether the backward pass is the window's
    last, and it computes a mean over ranks, but losses here add up to a sum.

    Args:
        members: parameters in the model's order.
        group: ranks that split the batch.
        limit: bytes of a bucket.
        dtype: type of the collective; None: that of the optimizer's parameters.
        kind: class of the buckets.
    """

    def __init__(
        self,
        members: Sequence[ReducedParameter],
        group: Group,
        *,
        limit: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        kind: Callable[[list[Any], torch.dtype | None], Bucket] = Bucket,
    ) -> None:
        self.group = group
        self.buckets = cut_into_buckets(members, limit, dtype, kind)
        self._bucket_of = {id(member.read): bucket for bucket in self.buckets for member in bucket.members}
        self._next: int | None = None  # next bucket to send; None outside a window's last backward pass
        self._under_way: list[Any] = []
        for member in members:
            member.read.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start the window's last backward pass."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        self._next = 0

    def _accumulate(self, parameter: Tensor) -> None:
        if self._next is None:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._send(self.buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        bucket.pack()
        self._under_way.append(bucket.send(self.group))

    def finish(self) -> None:
        """Send the remaining buckets (with unused parameters) and wait; on a GPU the stream waits, not the host."""
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for bucket, work in zip(self.buckets, self._under_way, strict=True):
            work.wait()
            bucket.hand_out()
        self.drop()

    def drop(self) -> None:
        """End the pass, also after an error."""
        self._next = None
        self._under_way.clear()


class DdpEngine(PlainEngine):
    """Whole weights and moments on every rank; gradients are summed once per window. Every rank owns an equal range of
    each parameter, so that all ranks write checkpoints."""

    name = "ddp"

    reduction: GradientReduction | None = None
    """None on one rank."""

    def place(self, module: nn.Module) -> nn.Module:
        if self.data_group.size > 1 and not dist.is_initialized():
            raise EngineError("--engine ddp needs a process group: start with torchrun or deepspeed")
        return fill_module(module, self.device)

    def build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.data_group.size > 1:
            dtype = torch.bfloat16 if self.config.training.gradients == "bf16" else None
            self.reduction = self.build_reduction(module, dtype)
        optimizer = super().build_optimizer(module)
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.hold([parameter for _, parameter in self.named_parameters()], self.data_group)
        return optimizer

    def build_reduction(self, module: nn.Module, dtype: torch.dtype | None) -> GradientReduction:
        """Return the reduction of gradients, sent as `dtype`, over the data ranks."""
        owned = (parameter for _, parameter in self.named_parameters())
        members = [
            ReducedParameter(*pair) for pair in zip(module.parameters(), owned, strict=True) if pair[0].requires_grad
        ]
        return GradientReduction(members, self.data_group, dtype=dtype)

    def accumulate(self, loss: Tensor, *, last: bool, retain_graph: bool = False) -> None:
        if self.reduction is None or not last:
            super().accumulate(loss, last=last, retain_graph=retain_graph)
            return
        self.watch_backward()
        self.reduction.begin()
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self.reduction.finish()

    @property
    def reduces(self) -> bool:
        return self.reduction is not None

    def owns_gradient(self, gradient: Tensor) -> bool:
        buckets = () if self.reduction is None else self.reduction.buckets
        return any(gradient.untyped_storage().data_ptr() == b.flat.untyped_storage().data_ptr() for b in buckets)

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
        return [vector[start:stop] for vector in whole for start, stop in shares(vector.numel(), self.data_group.size)]

    def full_weights(self) -> dict[str, Tensor]:
        return super().full_weights() if self.data_group.rank == 0 else {}


@dataclass(frozen=True, slots=True)
class SharedMember(ReducedParameter):
    """Parameter of the backward pass (`read`), of the window's gradient sum (`own`), and this rank's rows (`rows`)."""

    rows: nn.Parameter


class SharedBucket(Bucket):
    """Bucket with reduce-scattered gradients and all-gathered weights.

    Args:
        members, dtype: as in Bucket.
        group: ranks that share the rows.
    Attributes:
        flat: [ranks x width] rows of the first rank of each member, then of the second rank, and so on, with padding
            after the last row if rows do not divide.
    """

    members: list[SharedMember]  # type: ignore[assignment]

    def __init__(self, members: list[SharedMember], dtype: torch.dtype | None, *, group: Group) -> None:
        self.members, self.group, self.missing = members, group, 0
        first = members[0].own
        sizes = [self._rows(member) * self._numbers(member) for member in members]
        self.starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.width = sum(sizes)
        self.flat = torch.zeros(group.size * self.width, dtype=dtype or first.dtype, device=first.device)
        self.sums = torch.empty(self.width, dtype=self.flat.dtype, device=first.device)

    def _rows(self, member: SharedMember) -> int:
        return -(-len(member.own) // self.group.size)

    @staticmethod
    def _numbers(member: SharedMember) -> int:
        return member.own[:1].numel()

    def places(self, number: int, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return self._places(self.flat, number, gradient)

    def _places(self, flat: Tensor, number: int, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of a tensor with the layout of `flat`, and the matching parts of a member's whole tensor."""
        member, start = self.members[number], self.starts[number]
        rows, size = self._rows(member), self._numbers(member)
        table = flat.view(self.group.size, self.width)
        full = len(whole) // rows  # ranks without padding
        yield table[:full, start : start + rows * size], whole[: full * rows].reshape(full, rows * size)
        if left := len(whole) - full * rows:
            yield table[full, start : start + left * size], whole[full * rows :].reshape(-1)

    def _own_rows(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + member.rows.numel()].view_as(member.rows)
            for start, member in zip(self.starts, self.members, strict=True)
        ]

    def send(self, group: Group) -> Any:
        return dist.reduce_scatter_tensor(self.sums, self.flat, group=group.handle, async_op=True)

    def hand_out(self) -> None:
        for member, gradient in zip(self.members, self._own_rows(self.sums.to(self.members[0].own.dtype)), strict=True):
            member.rows.grad = gradient

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the rows of all ranks into the weights of the forward pass."""
        dtype = self.members[0].read.dtype
        rows = torch.empty(self.width, dtype=dtype, device=self.flat.device)
        torch._foreach_copy_(self._own_rows(rows), [member.rows for member in self.members])
        whole = torch.empty(len(self.flat), dtype=dtype, device=self.flat.device)
        dist.all_gather_into_tensor(whole, rows, group=self.group.handle)
        pairs = [pair for number, m in enumerate(self.members) for pair in self._places(whole, number, m.read.detach())]
        torch._foreach_copy_([weights for _, weights in pairs], [gathered for gathered, _ in pairs])


class OwnRows(Masters):
    """Masters that consist of the rows that this rank updates.

    Args:
        module: in fp32.
        group: ranks that share the rows.
        rounded: forwards read bf16: the module becomes bf16 in place, and only the rows stay in fp32.
    Attributes:
        names, read: as in Masters.
        own: [rows, ...] of each parameter; views of the module's parameters if not rounded.
        rows: [first, last) row of each parameter.
    """

    def __init__(self, module: nn.Module, group: Group, *, rounded: bool) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self.read = list(module.parameters())
        for name, parameter in zip(self.names, self.read, strict=True):
            if not parameter.requires_grad:
                raise EngineError(
                    f"--megatron.shard_moments: {name} does not learn, and would not be sent; allowed: "
                    "--megatron.shard_moments False"
                )
        self.group = group
        self.rows = [shares(len(parameter), group.size)[group.rank] for parameter in self.read]
        parts = [each.detach()[start:stop] for each, (start, stop) in zip(self.read, self.rows, strict=True)]
        self.own = [nn.Parameter(part.clone() if rounded else part) for part in parts]
        self.sums = self.read
        if rounded:
            # fp32 sums of whole gradients, as `.grad` of parameters without memory.
            self.sums = [nn.Parameter(each.detach().new_zeros(()).expand(each.shape)) for each in self.read]
            for parameter in self.read:
                parameter.data = parameter.data.bfloat16()
        self.buckets: list[SharedBucket] = []

    def reduction(self, dtype: torch.dtype | None) -> GradientReduction:

        def bucket(members: list[SharedMember], dtype: torch.dtype | None) -> SharedBucket:
            self.buckets.append(bucket := SharedBucket(members, dtype, group=self.group))
            return bucket

        members = [SharedMember(*member) for member in zip(self.read, self.sums, self.own, strict=True)]
        return GradientReduction(members, self.group, dtype=dtype, kind=bucket)

    def publish(self) -> None:
        for bucket in self.buckets:
            bucket.publish()

    def take_gradients(self) -> None:
        if self.sums is not self.read:
            take_gradients(zip(self.read, self.sums, strict=True))

    def discard_gradients(self) -> None:
        for parameter in (*self.read, *self.sums):
            parameter.grad = None
