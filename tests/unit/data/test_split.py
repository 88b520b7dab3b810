"""Splits: by block, disjoint, stable."""

from __future__ import annotations

import numpy as np
import pytest

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Words, name_hash
from trp_scale.data.plan import downstream_validation, held_out

GOLDEN = [8, 11, 54, 56, 71, 101, 114, 173, 179, 181, 183, 195]
DOWNSTREAM_GOLDEN = [3, 6, 9, 10, 12, 14, 17, 21, 30, 35, 36, 37, 47, 48, 52, 54, 55, 56]


def identities(count: int) -> Words:
    return np.array([name_hash(f"text-{number:06d}") for number in range(count)], dtype=np.uint64)


def test_share_and_stability() -> None:
    chosen = held_out(identities(20_000), 0.05, where="d")
    assert abs(chosen.mean() - 0.05) < 0.006  # 4 standard deviations
    more = held_out(identities(30_000), 0.05, where="d")
    assert (more[:20_000] == chosen).all()  # new blocks move no old one
    larger = held_out(identities(20_000), 0.1, where="d")
    assert larger[chosen].all()  # a larger share keeps what was held out


def test_golden_blocks() -> None:
    assert np.flatnonzero(held_out(identities(200), 0.05, where="d")).tolist() == GOLDEN


def test_at_least_one_and_never_all() -> None:
    few = identities(3)
    chosen = held_out(few, 1e-9, where="d")
    assert np.flatnonzero(chosen).tolist() == [int(np.argmin(few))]
    assert not held_out(few, 0.0, where="d").any()
    with pytest.raises(RefusedError, match=r"all 1 blocks.* --rows_per_block, .* --data\.validation_fraction 0"):
        held_out(identities(1), 0.01, where="d")
    with pytest.raises(RefusedError, match="0 <= fraction < 1"):
        held_out(few, 1.0, where="d")


def test_downstream_knows_nothing_of_what_is_held_out() -> None:
    """By the same hash, holding out a fifth would leave D_val empty."""
    held = held_out(identities(20_000), 0.2, where="d")
    chosen = downstream_validation(identities(20_000), 0.2, training=~held, where="d")
    assert not (chosen & held).any() and abs(chosen[~held].mean() - 0.2) < 0.013
    every = downstream_validation(identities(20_000), 0.2, training=np.ones_like(held), where="d")
    assert (every[~held] == chosen[~held]).all()  # what is held out moves no other block
    assert np.flatnonzero(every[:60]).tolist() == DOWNSTREAM_GOLDEN


def test_downstream_parts_are_never_empty() -> None:
    two = np.ones(2, dtype=np.bool_)
    assert downstream_validation(identities(2), 1e-9, training=two, where="d").sum() == 1
    with pytest.raises(RefusedError, match=r"d: .*all 2 training blocks into D_val, .*smaller --rows_per_block"):
        downstream_validation(identities(2), 1 - 1e-9, training=two, where="d")
    for share in (0.0, 1.0):
        with pytest.raises(RefusedError, match=r"--multilevel\.validation_share is [01]\.0, allowed"):
            downstream_validation(identities(2), share, training=two, where="d")
