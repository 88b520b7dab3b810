"""Collectives over a group; over more ranks they are tested in tests/distributed."""

from __future__ import annotations

import torch

from tests.ranks import Ranks
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import ALONE, Group


def test_alone_every_collective_gives_a_copy_of_its_value() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    for result in (ALONE.sum(value), ALONE.max(value)):
        assert result.tolist() == [1.0, 2.0] and not result.requires_grad
        result += 1
    assert value.tolist() == [1.0, 2.0]
    assert ALONE.gather_objects("x") == ["x"] and ALONE.broadcast_object(3) == 3
    ALONE.require_equal({"a": 1}, "a setting")
    ALONE.barrier()


def on_two() -> tuple[list[float], list[float], list[str], str, str]:
    rank = Environment().info.rank
    group = Group("data", rank=rank, size=2)
    value = torch.tensor([float(rank), -float(rank)])
    try:
        group.require_equal(rank, "the rank")
    except RuntimeError as error:
        message = str(error)
    return (
        group.sum(value).tolist(),
        group.max(value).tolist(),
        group.gather_objects(f"rank {rank}"),
        group.broadcast_object(f"rank {rank}"),
        message,
    )


def test_two_ranks_agree(two_ranks: Ranks) -> None:
    results = two_ranks(on_two)
    assert results[0] == results[1]
    total, largest, gathered, first, message = results[0]
    assert total == [1.0, -1.0] and largest == [1.0, 0.0]
    assert gathered == ["rank 0", "rank 1"] and first == "rank 0"
    assert "the rank" in message and "rank 1: 1" in message and "data group" in message
