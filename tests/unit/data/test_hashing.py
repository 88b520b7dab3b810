"""The hash is part of the stored format of a run: its outputs are frozen here."""

from __future__ import annotations

import numpy as np
import pytest

from trp_scale.config import RefusedError
from trp_scale.data.hashing import PLACE_BITS, below, mix, mix_integer, name_hash, permutation, stream

GOLDEN_NAME = 2988402256867507408

GOLDEN_STREAM = 10870674876199794235

GOLDEN_PERMUTATION = [0, 2, 1, 7, 5, 4, 3, 6]


def test_mix_is_splitmix64() -> None:
    # The published test vector: splitmix64 seeded with 1234567 gives these first two numbers.
    gamma = 0x9E3779B97F4A7C15
    assert mix_integer(1234567) == 6457827717110365317
    assert mix_integer(1234567 + gamma) == 3203168211198807973


def test_array_and_integer_agree() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    array = np.array(values, dtype=np.uint64)
    assert mix(array).tolist() == [mix_integer(value) for value in values]
    assert array.tolist() == values  # the argument is left alone


def test_golden_values() -> None:
    assert name_hash("text-000000-000000") == GOLDEN_NAME
    assert stream(0, "order of blocks", "", 0) == GOLDEN_STREAM
    assert stream(-1, "x", -1) == stream(2**64 - 1, "x", 2**64 - 1)
    assert permutation(stream(0, "x"), np.arange(8, dtype=np.uint64)).tolist() == GOLDEN_PERMUTATION


def test_permutation_keeps_the_order_of_equal_identities() -> None:
    same = np.zeros(1000, dtype=np.uint64)
    assert permutation(7, same).tolist() == list(range(1000))


def test_permutation_is_uniform() -> None:
    # Chi-square of the first place over 6 things in 6,000 permutations; 99.99 % quantile, 5 degrees of freedom: 25.7.
    firsts = [permutation(stream(3, index), np.arange(6, dtype=np.uint64))[0] for index in range(6000)]
    counts = np.bincount(firsts, minlength=6)
    assert ((counts - 1000) ** 2 / 1000).sum() < 25.7


def test_permutation_refuses_more_than_fit() -> None:
    with pytest.raises(RefusedError, match="blocks_per_group"):
        permutation(0, np.zeros((1 << PLACE_BITS) + 1, dtype=np.uint64))


def test_below_reaches_all_and_nothing_else() -> None:
    draws = below(mix(np.arange(7000, dtype=np.uint64)), 7)
    counts = np.bincount(draws, minlength=7)
    assert len(counts) == 7
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # 99.99 % quantile with 6 degrees of freedom


def test_parts_are_ordered_and_distinct() -> None:
    states = {stream(0, a, b) for a in range(30) for b in range(30)}
    assert len(states) == 900
