"""Damaged blocks: their rows come without elements, the order does not move, and they are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.data.loaded import FIELDS, damage, joined, steps, table_of
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.pretraining.base import open_sources


@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_an_unreadable_block_come_without_elements(tmp_path: Path, world: int) -> None:
    data = write_dataset(tmp_path / "data", block_rows=[[5, 7, 3, 9], [8, 6, 4, 11, 5]])
    whole = steps(config_for(data), world, 5)
    key = damage(data, block=1, member=0, place=0, content=b"broken")
    ranks = [open_sources(config_for(data), rank=rank, world=world) for rank in range(world)]
    seen, missing = set(), 0
    for expected in whole:
        windows = [sources.train.next_window() for sources in ranks]
        seen |= {name for window in windows for batch in window for name in batch.corrupt}
        step = joined(windows)
        there = step["row_weights"] == 1
        missing += int((~there).sum())
        assert torch.equal(step["keys"], expected["keys"])  # the order does not move
        for name in FIELDS:
            assert torch.equal(step[name][there], expected[name][there]), name
        assert (step["label_weights"][~there] == 0).all()
        assert (step["attention_mask"][~there].sum(dim=1) == 3).all()
    assert seen == {key} and missing >= 7


def test_checksums_are_checked_when_asked(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", block_rows=[[5, 7]])
    key = damage(data, block=0, member=0, place=-2, content=b"\x07\x00")
    for verify, expected in ((False, []), (True, [key])):
        config = config_for(data, data={"verify": verify})
        window = open_sources(config, rank=0, world=1).train.next_window()
        assert sorted({name for batch in window for name in batch.corrupt}) == expected


@pytest.mark.parametrize(
    ("member", "content"),
    [(0, b"\xff\xff"), (1, b"\x0f"), (2, b"\xff\xff")],
    ids=["token beyond the vocabulary", "group beyond the table", "sentence end beyond the row"],
)
def test_values_out_of_range_leave_out_the_rows_they_touch(tmp_path: Path, member: int, content: bytes) -> None:
    """Only those rows: what happens to a row must not depend on which rows were read before it."""
    data = write_dataset(tmp_path / "data", block_rows=[[5, 7]])
    key = damage(data, block=1, member=member, place=-len(content), content=content)
    config = config_for(data, data={"verify": False})  # a checksum would leave out the whole block
    window = open_sources(config, rank=0, world=1).train.next_window()
    step = joined([window])
    left_out = step["keys"][step["row_weights"] == 0].tolist()
    identity = int(table_of(data)[1].identities[1])
    assert (identity + 6) & (2**63 - 1) in left_out  # the last row of the block
    assert len(left_out) < 7
    assert {name for batch in window for name in batch.corrupt} == {key}
