"""Opened data sets of text: what is checked, and the loader on what trp-scale shard-text writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.unit.data.loaded import FIELDS, damage, joined, steps, table_of
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.sources import Sources
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


@pytest.fixture(scope="module")
def sources(text_dataset: Path) -> Sources:
    config = config_for(text_dataset, data={"validation_fraction": 0.1, "verify": True})
    config.batch.global_size = config.batch.micro_size = 64
    return open_sources(config, rank=0, world=1)


@pytest.fixture(scope="module")
def epoch(sources: Sources) -> list[Batch]:
    """One epoch of training rows, and a little more."""
    return [sources.train.next_window()[0] for _ in range(-(-sources.train.rows // 64))]


def test_all_rows_are_there(text_dataset: Path, sources: Sources) -> None:
    document = json.loads((text_dataset / "dataset.json").read_text())
    assert sources.train.rows + sources.validation.rows == document["rows"]
    assert sources.validation.rows > 0


def test_nothing_is_damaged_and_statistics_hold(epoch: list[Batch]) -> None:
    assert [batch.corrupt for batch in epoch] == [[]] * len(epoch)
    assert all((batch["row_weights"] == 1).all() for batch in epoch)
    attended = sum(int(batch["attention_mask"].sum()) - 3 * batch.rows for batch in epoch)
    masked = sum(float(batch["label_weights"].sum()) for batch in epoch)
    assert abs(masked / attended - 0.15) < 0.01  # rounding and the limit, on short sequences
    wrong = torch.cat([batch["next_sentence"] for batch in epoch]).double()
    assert abs(float(wrong.mean()) - 0.5) < 4 * 0.5 / np.sqrt(len(wrong))


def test_labels_restore_english(text_dataset: Path, epoch: list[Batch]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text_dataset / "tokenizer")
    batch = epoch[0]
    tokens = batch["tokens"].clone()
    used = batch["label_weights"] > 0
    row, slot = torch.nonzero(used, as_tuple=True)
    tokens[row, batch["masked_positions"][row, slot]] = batch["labels"][row, slot]
    assert tokenizer.mask_token_id not in tokens
    text = " ".join(tokenizer.batch_decode(tokens, skip_special_tokens=True)).split()
    assert sum(word in {"the", "of", "a", "is", "to", "and", "in"} for word in text) > 0.08 * len(text)
    pairs = [tokenizer.decode(line) for line in tokens]
    assert all(pair.startswith("[CLS] ") and pair.count("[SEP]") == 2 for pair in pairs)


def test_digest_tells_storage_apart(tmp_path: Path) -> None:
    digests = set()
    for name, seed, rows in (("a", 0, [[5, 4]]), ("same", 0, [[5, 4]]), ("b", 1, [[5, 4]]), ("c", 0, [[5], [4]])):
        write_dataset(tmp_path / name, block_rows=rows, seed=seed)
        digests.add(open_sources(config_for(tmp_path / name), rank=0, world=1).digest())
    assert len(digests) == 3  # the directory's name does not matter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "format 3 .*1 or 2"),
        ({"format": 2}, "segments_per_row"),
        ({"format": 2, "segments_per_row": 4}, "row_length 21 .* 24"),
        ({"kind": "images"}, "kind 'images' .*'text'"),
        ({"row_length": 20}, "row_length 20 .* 21"),
        ({"groups": ["noun"]}, "groups"),
        ({"special_tokens": {"pad": 0}}, "'unk'"),
    ],
)
def test_description_is_checked(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5]], changes=changes)
    with pytest.raises(DataError, match=message):
        open_sources(config_for(tmp_path / "a"), rank=0, world=1)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", block_rows=[[5, 7], [3, 9]])
    for sections, message in (
        ({"model": {"max_positions": 16}}, r"--model\.max_positions 24"),
        ({"data": {"blocks_per_group": 0}}, r"data\.blocks_per_group: 0"),
    ):
        with pytest.raises(RefusedError, match=message):
            open_sources(config_for(dataset, **sections), rank=0, world=1)


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
