"""Collectives over a named group of ranks; all of them do nothing in a world of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Ranks that act together.

    Attributes:
        name: data, tensor or world.
        rank: this process's place in the group.
        size: number of ranks.
        handle: torch's process group; None stands for the default group, or for no group at all when size is 1.
    """

    name: str
    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the ranks, in place on a detached copy; `value` is the same shape and type on every rank."""
        result = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(result, op=dist.ReduceOp.SUM, group=self.handle)
        return result

    def max(self, value: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        result = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.handle)
        return result

    def gather_objects(self, value: T) -> list[T]:
        """`value` of every rank, on every rank, in rank order. Slow: for start-up checks and checkpoints only."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values  # type: ignore[return-value]

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        return self.gather_objects(value)[0]

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        if self.size > 1:
            dist.barrier(group=self.handle)

    def require_equal(self, value: object, what: str) -> None:
        """Check at start-up that all ranks see the same thing.

        Raises:
            RuntimeError: on every rank, naming what differs and the value of each rank.
        """
        values: Sequence[object] = self.gather_objects(value)
        if any(other != values[0] for other in values):
            listed = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
            raise RuntimeError(f"{what} is not the same on all ranks of the {self.name} group: {listed}")


ALONE = Group("data")
"""A group of this process only."""
