"""Weighted mixtures: exact shares, every row of a member once an epoch of that member."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from trp_scale.config import RefusedError
from trp_scale.data.mixture import Mixture, parse_paths

GOLDEN_MEMBERS = [1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0]

GOLDEN_WITHIN = [2, 5, 1, 3, 0, 4, 2, 0, 6, 1, 8, 5, 9, 4, 7, 12, 10, 3, 13, 11]

WEIGHTS = [Fraction("0.7"), Fraction("0.3")]


def mixture(seed: int = 0) -> Mixture:
    return Mixture(seed=seed, names=["books", "wiki"], weights=WEIGHTS)


def test_shares_are_exact_in_every_cycle() -> None:
    member, _ = mixture().locate(np.arange(10_000))
    assert mixture().cycle == 10
    assert (member.reshape(-1, 10) == 1).sum(axis=1).tolist() == [3] * 1000


def test_each_member_is_read_without_gap_or_repeat() -> None:
    member, within = mixture().locate(np.arange(10_000))
    for number, count in ((0, 7000), (1, 3000)):
        assert sorted(within[member == number].tolist()) == list(range(count))


def test_order_within_cycles_is_shuffled() -> None:
    member, _ = mixture().locate(np.arange(1000))
    cycles = {tuple(cycle) for cycle in member.reshape(-1, 10).tolist()}
    assert len(cycles) > 50
    other, _ = mixture(seed=1).locate(np.arange(1000))
    assert member.tolist() != other.tolist()


def test_any_slice_gives_the_same() -> None:
    member, within = mixture().locate(np.arange(500))
    chosen = np.random.default_rng(0).permutation(500)[:100]
    assert mixture().locate(chosen)[0].tolist() == member[chosen].tolist()
    assert mixture().locate(chosen)[1].tolist() == within[chosen].tolist()


def test_golden_order() -> None:
    member, within = mixture().locate(np.arange(20))
    assert member.tolist() == GOLDEN_MEMBERS
    assert within.tolist() == GOLDEN_WITHIN


def test_weights_need_not_sum_to_one() -> None:
    uneven = Mixture(seed=0, names=["a", "b", "c"], weights=[Fraction(1), Fraction(2), Fraction(5)])
    member, _ = uneven.locate(np.arange(8000))
    assert np.bincount(member).tolist() == [1000, 2000, 5000]


def test_weights_with_too_long_a_cycle_are_refused() -> None:
    with pytest.raises(RefusedError, match="fewer decimals"):
        Mixture(seed=0, names=["a", "b"], weights=[Fraction("0.123457"), Fraction("0.7")])


def test_parse_paths() -> None:
    members = parse_paths("books:0.7=/data/a, wiki:0.3=/data/b=c")
    assert [(member.name, member.weight, member.path) for member in members] == [
        ("books", Fraction(7, 10), Path("/data/a")),
        ("wiki", Fraction(3, 10), Path("/data/b=c")),
    ]
    (alone,) = parse_paths("/data/with,comma=and:colon")
    assert (alone.name, alone.path) == ("", Path("/data/with,comma=and:colon"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--data.path"),
        ("a:0.5=/x,/y", "'/y' is not"),
        ("a:0=/x,b:1=/y", "'a' is 0"),
        ("a:0.5=/x,a:0.5=/y", "'a' is used twice"),
    ],
)
def test_bad_paths_are_refused(text: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        parse_paths(text)
