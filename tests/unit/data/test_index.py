"""Indexes beside tars: wrong entries are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.images.stored import sample, write_images
from tests.unit.data.stored import config_for, dataset_with, members
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_json, write_json
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


def both(**member: int) -> dict[str, dict[str, int]]:
    return {"jpg": member, "cls": member}


def rewrite_index(path: Path, block: int, changes: dict[str, object]) -> None:
    document = read_json(path)
    document["blocks"][block] |= changes
    write_json(path, document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "n00000"}, "'n00000'"),
        ({"rows": 2}, "n00001: 2 rows"),
        ({"members": {"jpg": {"offset": 0, "length": 9, "crc32": 0}}}, r"n00001 .*\.cls"),
        ({"members": 5}, r"000000\.index\.json: block n00001: members is 5"),
        ({"members": both(offset=0, length=9)}, "n00001: members.cls .*crc32"),
        ({"members": both(offset=9000, length=9000, crc32=0)}, r"image-000000\.tar.*n00001"),
        ({"members": both(offset=-1, length=9, crc32=0)}, "n00001"),
    ],
)
def test_wrong_indexes_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    data = write_images(tmp_path / "data", [[sample(0, 8, 8), sample(1, 8, 8)]])
    rewrite_index(data / "shards" / "image-000000.index.json", 1, changes)
    with pytest.raises(DataError, match=message):
        open_image_dataset(data)


@pytest.mark.parametrize("change", [{"rows": True}, {"rows": 0}, {"label": "x"}, {"more": 1}], ids=str)
def test_a_block_of_text_with_other_fields_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    dataset = dataset_with(tmp_path / "data", x=members())
    rewrite_index(dataset / "shards" / "text-000000.index.json", 0, change)
    with pytest.raises(DataError, match="block x"):
        open_sources(config_for(dataset), rank=0, world=1)


def test_an_index_of_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[sample(0, 8, 8)]])
    path = data / "shards" / "image-000000.index.json"
    write_json(path, {**read_json(path), "format": 1})
    with pytest.raises(DataError) as raised:
        open_image_dataset(data)
    assert str(raised.value).startswith(f"{path}: format 1 ") and "\n" not in str(raised.value)
