"""Moments sharded over the data ranks (ZeRO stage 1, Rajbhandari et al. 2020): each rank updates some rows of every
parameter.

Gradients are reduce-scattered bucket by bucket, and the ranks all-gather the new weights after the update. This sends
the bytes of one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import shares
from trp_scale.distributed.groups import Group
from trp_scale.engines.ddp import Bucket, GradientReduction, ReducedParameter
from trp_scale.engines.plain import Masters, take_gradients


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
