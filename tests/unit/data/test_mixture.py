"""Weighted mixtures: exact shares, every row of a member once an epoch of that member."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.loaded import assert_same, damage, joined, steps
from tests.unit.data.stored import SPECIAL, config_for, write_dataset
from trp_scale.config import RefusedError
from trp_scale.data.mixture import Mixture, parse_paths
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources

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
        ("a:0.5=/x,/y", "'/y' found"),
        ("a:0=/x,b:1=/y", "'a' is 0"),
        ("a:0.5=/x,a:0.5=/y", "'a' is used twice"),
    ],
)
def test_bad_paths_are_refused(text: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        parse_paths(text)


def test_mixture(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5, 7, 3]], seed=1)
    write_dataset(tmp_path / "b", block_rows=[[4, 2, 5]], seed=2)  # the same block keys
    path = f"books:0.75={tmp_path / 'a'},wiki:0.25={tmp_path / 'b'}"
    config = config_for(path, data={"validation_fraction": 0.2})
    sources = open_sources(config, rank=0, world=1)
    held_out = joined([list(sources.validation.windows())])
    keys = joined([sources.train.next_window() for _ in range(20)])["keys"].tolist()
    validated = held_out["keys"][held_out["row_weights"] == 1].tolist()
    assert sources.train.rows + len(validated) == 26 == len(set(keys) | set(validated))
    assert not set(keys) & set(validated)
    alone = open_sources(config_for(tmp_path / "b"), rank=0, world=1)
    assert sources.meta.tokenizer_directories == (tmp_path / "a" / "tokenizer", tmp_path / "b" / "tokenizer")
    assert not set(keys) & set(joined([alone.train.next_window()])["keys"].tolist())  # names of members go into keys
    assert_same(steps(config, 2, 4), steps(config_for(path, data={"validation_fraction": 0.2, "workers": 1}), 1, 4))


def test_mixture_names_the_corrupt_block_with_its_member(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5, 7, 3]])
    write_dataset(tmp_path / "b", block_rows=[[4]])
    key = damage(tmp_path / "b", block=0, member=0, place=0, content=b"broken")
    config = config_for(f"books:1={tmp_path / 'a'},wiki:1={tmp_path / 'b'}")
    window = open_sources(config, rank=0, world=1).train.next_window()
    assert {name for batch in window for name in batch.corrupt} == {f"wiki/{key}"}
    assert int(sum(batch["row_weights"].sum() for batch in window)) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"changes": {"vocab_size": 99}}, "vocab_size: books .*60, wiki .*99"),
        ({"changes": {"special_tokens": {**SPECIAL, "mask": 5}}}, "special_tokens"),
        ({"length": 32}, "length: books .*24, wiki .*32"),
        ({}, r"--tokenizer \S+/tokenizer"),
    ],
)
def test_members_of_a_mixture_must_agree(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5]])
    write_dataset(tmp_path / "b", block_rows=[[5]], **changes)
    if not changes:  # another tokenizer
        (tmp_path / "b" / "tokenizer").mkdir()
        (tmp_path / "b" / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=message):
        open_sources(config_for(f"books:1={tmp_path / 'a'},wiki:1={tmp_path / 'b'}"), rank=0, world=1)
