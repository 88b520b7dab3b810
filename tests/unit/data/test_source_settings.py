"""What is refused when a data set is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.stored import config_for, write_dataset
from trp_scale.config import RefusedError
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


def test_digest_tells_storage_apart(tmp_path: Path) -> None:
    digests = set()
    for name, seed, rows in (("a", 0, [[5, 4]]), ("same", 0, [[5, 4]]), ("b", 1, [[5, 4]]), ("c", 0, [[5], [4]])):
        write_dataset(tmp_path / name, block_rows=rows, seed=seed)
        digests.add(open_sources(config_for(tmp_path / name), rank=0, world=1).digest())
    assert len(digests) == 3  # the directory's name does not matter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2 found, 1 expected"),
        ({"kind": "images"}, "kind 'images' found, 'text' expected"),
        ({"row_length": 20}, "row_length 20 found, length - 3 = 21"),
        ({"groups": ["noun"]}, "groups"),
        ({"special_tokens": {"pad": 0}}, "has no 'unk'"),
    ],
)
def test_description_is_checked(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_dataset(tmp_path / "a", block_rows=[[5]], changes=changes)
    with pytest.raises(DataError, match=message):
        open_sources(config_for(tmp_path / "a"), rank=0, world=1)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", block_rows=[[5, 7], [3, 9]])
    with pytest.raises(RefusedError, match=r"--model\.max_positions 24"):
        open_sources(config_for(dataset, model={"max_positions": 16}), rank=0, world=1)
    with pytest.raises(RefusedError, match="does not divide over 5 ranks"):
        open_sources(config_for(dataset), rank=0, world=5)
    with pytest.raises(RefusedError, match=r"data\.blocks_per_group: 0"):
        open_sources(config_for(dataset, data={"blocks_per_group": 0}), rank=0, world=1)
    with pytest.raises(DataError, match="nowhere: no such file"):
        open_sources(config_for(tmp_path / "nowhere"), rank=0, world=1)
