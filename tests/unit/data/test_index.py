"""Indexes beside tars: wrong entries are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.images.stored import sample, write_images
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_json, write_json
from trp_scale.errors import DataError


def both(**member: int) -> dict[str, dict[str, int]]:
    return {"jpg": member, "cls": member}


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
    path = data / "shards" / "image-000000.index.json"
    document = read_json(path)
    document["blocks"][1].update(changes)
    write_json(path, document)
    with pytest.raises(DataError, match=message):
        open_image_dataset(data)


def test_an_index_without_classes_is_refused_in_one_line(tmp_path: Path) -> None:
    """Format 1 had none."""
    data = write_images(tmp_path / "data", [[sample(0, 8, 8)]])
    path = data / "shards" / "image-000000.index.json"
    document = read_json(path)
    del document["blocks"][0]["label"]
    write_json(path, {**document, "format": 1})
    with pytest.raises(DataError) as raised:
        open_image_dataset(data)
    assert str(raised.value).startswith(f"{path}: format 1 ") and "\n" not in str(raised.value)
