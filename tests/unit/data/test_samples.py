"""Blocks of shards: members, sizes, keys and places are checked when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.stored import config_for, members, write_dataset, write_shard
from trp_scale.data.index import index_path
from trp_scale.data.samples import read_samples
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


def test_shards_are_checked_at_the_start(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", block_rows=[[2, 3], [4]])
    shard = dataset / "shards" / "text-000001.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[:-512])
    with pytest.raises(DataError, match=rf"text-000001\.tar.* {len(content) - 512} .*{len(content)} "):
        open_sources(config_for(dataset), rank=0, world=1)
    for path in (shard, index_path(shard)):
        path.unlink()
        with pytest.raises(DataError, match=path.name):
            open_sources(config_for(dataset), rank=0, world=1)


def test_keys_are_unique_and_shard_names_plain(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", block_rows=[[2]])
    shards = tmp_path / "a" / "shards"
    write_shard(shards / "other.tar", {"text-000000-000000": members()}, {"text-000000-000000": 2})
    with pytest.raises(DataError, match="'text-000000-000000'"):
        read_samples(shards, ["text-000000.tar", "other.tar"], SUFFIXES, None)
    with pytest.raises(DataError, match=r"'\.\./shards/text-000000\.tar'"):
        read_samples(shards, ["../shards/text-000000.tar"], SUFFIXES, None)
