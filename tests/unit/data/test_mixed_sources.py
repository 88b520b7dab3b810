"""Several data sets as one source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.loaded import assert_same, damage, joined, steps
from tests.unit.data.stored import SPECIAL, config_for, write_dataset
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


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
        ({"vocab_size": 99}, "same vocab_size: books has 60, wiki has 99"),
        ({"special_tokens": {**SPECIAL, "mask": 5}}, "same special_tokens"),
    ],
)
def test_members_of_a_mixture_must_agree(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5]])
    write_dataset(tmp_path / "b", block_rows=[[5]], changes=changes)
    with pytest.raises(DataError, match=message):
        open_sources(config_for(f"books:1={tmp_path / 'a'},wiki:1={tmp_path / 'b'}"), rank=0, world=1)


def test_members_of_a_mixture_must_have_the_same_tokenizer_and_length(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5]])
    write_dataset(tmp_path / "b", block_rows=[[5]], length=32)
    path = f"books:1={tmp_path / 'a'},wiki:1={tmp_path / 'b'}"
    with pytest.raises(DataError, match="same length: books has 24, wiki has 32"):
        open_sources(config_for(path), rank=0, world=1)
    write_dataset(tmp_path / "c", block_rows=[[5]])
    (tmp_path / "c" / "tokenizer").mkdir()
    (tmp_path / "c" / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"must have one tokenizer, .* have each its own; shard one .* --tokenizer \S+/tokenizer or"
    ):
        open_sources(config_for(f"books:1={tmp_path / 'a'},wiki:1={tmp_path / 'c'}"), rank=0, world=1)
