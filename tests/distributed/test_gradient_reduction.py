"""Gradients summed in buckets during a backward pass (trp_scale/engines/ddp.py), against the sum written out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import Ranks
from tests.synthetic import data_group
from trp_scale.engines.ddp import GradientReduction, ReducedParameter, cut_into_buckets

WIDTHS = (3, 4, 5, 6)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(width, dtype=torch.float32)) for width in WIDTHS]


def members(every: list[nn.Parameter]) -> list[ReducedParameter]:
    return [ReducedParameter(parameter, parameter) for parameter in every]


def test_buckets_hold_all_from_last_to_first_within_their_limit() -> None:
    every = parameters()
    every.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    for limit, expected in (
        (1, [[4], [3], [2], [1], [0]]),
        (44, [[4], [3, 2], [1, 0]]),
        (1 << 20, [[4], [3, 2, 1, 0]]),
    ):
        buckets = cut_into_buckets(members(every), limit)
        numbers = {id(parameter): number for number, parameter in enumerate(every)}
        assert [[numbers[id(member.own)] for member in bucket.members] for bucket in buckets] == expected
        for bucket in buckets:
            assert bucket.flat.numel() == sum(view.numel() for view in bucket.views)
            assert all(view.shape == one.own.shape for view, one in zip(bucket.views, bucket.members, strict=True))


def loss_of(every: list[nn.Parameter], reached: tuple[int, ...], factor: float) -> Tensor:
    """Its gradient is 2 x factor x number + 1 in each element of a parameter that is reached."""
    return sum(
        (((2 * factor * number + 1) * every[number]).sum() for number in reached), torch.zeros((), requires_grad=True)
    )


def reduced(limit: int, first: tuple[int, ...], last: tuple[tuple[int, ...], ...]) -> tuple[list[Tensor], list[int]]:
    """Gradients after a window of two on each rank, and how many collectives each backward pass had begun; `last` has
    what the second backward pass reaches on each rank."""
    group, every = data_group(), parameters()
    reduction = GradientReduction(members(every), group, limit=limit)
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        original = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *args, **named: (calls.append(1), original(*args, **named))[1])
        loss_of(every, first, 1.0 + group.rank).backward()  # type: ignore[no-untyped-call]
        begun.append(len(calls))
        reduction.begin()
        loss_of(every, last[group.rank], 1.0).backward()  # type: ignore[no-untyped-call]
        begun.append(len(calls))
        reduction.finish()
        begun.append(len(calls))
    return [own.grad.clone() for own in every if own.grad is not None], begun


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ((0, 1, 2, 3), ((0, 1, 2, 3), (0, 1, 2, 3))),
        ((0, 1, 2, 3), ((1, 3), (0, 2))),
        ((0, 2), ((2,), (0, 2))),
        ((), ((), (0, 1, 2, 3))),
    ],
    ids=["all", "another part on each rank", "two never", "nothing on one rank"],
)
@pytest.mark.parametrize("limit", [1, 44, 1 << 20])
def test_each_rank_has_the_sum_of_both(
    two_ranks: Ranks, limit: int, first: tuple[int, ...], last: tuple[tuple[int, ...], ...]
) -> None:
    (ours, begun), (theirs, _) = two_ranks(reduced, limit, first, last)
    buckets = len(cut_into_buckets(members(parameters()), limit))
    assert len(ours) == len(WIDTHS)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other)
        own = sum((2 * (1.0 + rank) * number + 1) * (number in first) for rank in range(2))
        own += sum((2 * number + 1) * (number in reached) for reached in last)
        assert torch.equal(mine, torch.full((WIDTHS[number],), float(own))), number
    assert begun[0] == 0 and begun[2] == buckets
    if all(len(reached) == len(WIDTHS) for reached in last):
        assert begun[1] == buckets, "all go while the pass runs"
