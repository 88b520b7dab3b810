"""A cheap check that all ranks hold the same perturbation, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext

FINGERPRINT_BITS = 62
"""So that a fingerprint and its negative are both int64."""


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """0-dimensional int64 >= 0 from the bits of fp32 or int64 tensors and their places; integers only, so exact."""
    bits = torch.cat([tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors]).long()
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    # Multiplications by odd numbers and shifts (Vigna's splitmix64 mixes in this way); int64 wraps around.
    mixed = (bits ^ (places * 0x1E3779B97F4A7C15)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
    return (mixed ^ (mixed >> 31)).sum() & (2**FINGERPRINT_BITS - 1)  # type: ignore[no-any-return]


class AgreementCheck:
    """Compares the ranks each `every` steps with one all-reduce of two numbers.

    It is started before the loop reads the step's loss and read after, when nothing is left to wait for.

    Args:
        every: steps between checks; 0 = never.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._mine: Tensor | None = None
        self._largest: Tensor | None = None

    def start(self, ctx: StepContext, tensors: Iterable[Tensor]) -> None:
        """Reduce the fingerprint, on the steps that are due."""
        if ctx.data_group.size == 1 or self.every == 0 or (ctx.step + 1) % self.every:
            return
        self._mine = fingerprint(tensors)
        self._largest = ctx.data_group.max(torch.stack([self._mine, -self._mine]))

    def finish(self, ctx: StepContext) -> None:
        """Read what `start` reduced, if it did.

        Raises:
            RuntimeError: on all ranks together, with every rank's fingerprint.
        """
        if self._largest is None or self._mine is None:
            return
        largest, negative = self._largest.tolist()
        mine, self._mine, self._largest = self._mine, None, None
        if largest != -negative:
            held = ctx.data_group.gather_objects(int(mine))
            listed = ", ".join(f"rank {rank}: {value:016x}" for rank, value in enumerate(held))
            raise RuntimeError(
                f"step {ctx.step + 1}: the ranks hold different adversaries (fingerprints {listed}). They follow from "
                "one reduced gradient, so a rank has computed or received something else: check that machine, and "
                "resume from the last checkpoint (--resume auto)"
            )
