"""Global batches put together from all ranks, and damage to stored data."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.data.binary_index import OrderBlocks
from trp_scale.data.plan import Blocks, MixtureMember
from trp_scale.data.samples import SampleTable, read_samples
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.pretraining.base import open_sources

FIELDS = {
    "tokens": (torch.int64, (24,)),
    "token_types": (torch.int64, (24,)),
    "attention_mask": (torch.bool, (24,)),
    "masked_positions": (torch.int64, (4,)),
    "labels": (torch.int64, (4,)),
    "label_groups": (torch.int64, (4,)),
    "label_weights": (torch.float32, (4,)),
    "next_sentence": (torch.int64, ()),
    "row_weights": (torch.float32, ()),
}


def table_of(dataset: Path) -> tuple[SampleTable, OrderBlocks]:
    shards = sorted(path.name for path in (dataset / "shards").glob("*.tar"))
    return read_samples(dataset / "shards", shards, SUFFIXES, None)


def whole_member(blocks: Blocks, name: str = "") -> MixtureMember:
    """All blocks of a data set, with weight 1."""
    return MixtureMember(name=name, weight=Fraction(1), table=blocks, chosen=np.ones(len(blocks.rows), dtype=np.bool_))


def field_of(batch: Batch, name: str) -> torch.Tensor:
    """A batch in which nothing is padded has no mask."""
    whole = name == "attention_mask" and name not in batch.fields
    return torch.ones_like(batch["tokens"], dtype=torch.bool) if whole else batch[name]


def joined(windows: list[list[Batch]]) -> dict[str, torch.Tensor]:
    """All rows of the windows of all ranks, in order, of text or of images."""
    batches = [batch for window in windows for batch in window]
    names = FIELDS if "tokens" in batches[0].fields else batches[0].fields
    fields = {name: torch.cat([field_of(batch, name) for batch in batches]) for name in names}
    return {**fields, "keys": torch.cat([batch.keys for batch in batches])}


def steps(config: Config, world: int, count: int, cursor: int = 0) -> list[dict[str, torch.Tensor]]:
    """The global batch of each step, put together from all ranks."""
    ranks = [open_sources(config, rank=rank, world=world) for rank in range(world)]
    for sources in ranks:
        sources.train.seek(cursor)
    result = [joined([sources.train.next_window() for sources in ranks]) for _ in range(count)]
    for sources in ranks:
        assert sources.train.cursor == cursor + count * config.batch.global_size
        sources.close()
    return result


def assert_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=0, equal_nan=True, msg=name)


def damage(dataset: Path, block: int, member: int, place: int, content: bytes) -> str:
    """Overwrite bytes of a member, counted from its end if negative; returns the block's key."""
    table, blocks = table_of(dataset)
    shard = table.shards[table.shard_number(block)]
    stored = bytearray(shard.read_bytes())
    first = int(table.offsets[block, member]) + place + (int(table.lengths[block, member]) if place < 0 else 0)
    stored[first : first + len(content)] = content
    shard.write_bytes(stored)
    return blocks.keys[block]
