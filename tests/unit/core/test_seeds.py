"""Randomness by seed and name: equal everywhere, apart for each member."""

from __future__ import annotations

import torch

from trp_scale.core.run import per_member_rng, reseed, tensor_seed

CPU = torch.device("cpu")


def test_a_seed_follows_from_number_and_name_alone() -> None:
    """The numbers are part of what a recipe's result means."""
    assert tensor_seed(0, "encoder.weight") == tensor_seed(0, "encoder.weight")
    seeds = {tensor_seed(seed, name) for seed in range(20) for name in ("a", "b", "1/a")}
    assert len(seeds) == 60 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_members_draw_apart_and_leave_the_shared_state_alike() -> None:
    inside, after = [], []
    for member in (0, 1, 0):
        reseed(CPU, 7)
        with per_member_rng(CPU, member):
            inside.append(torch.rand(4).tolist())
        after.append(torch.rand(4).tolist())
    assert inside[0] == inside[2] != inside[1]
    assert after[0] == after[1] == after[2] != inside[0]
