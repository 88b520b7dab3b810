"""Images out of directories that Hugging Face's save_to_disk wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.images.source_images import jpeg, shard
from trp_scale.data.index import read_json
from trp_scale.errors import DataError


def test_a_dataset_directory_gives_the_bytes_of_its_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    contents = [jpeg(number) if number != 3 else b"broken" for number in range(6)]
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["ant", "bee"]),
            "other": datasets.Value("string"),
        }
    )
    rows = {
        "picture": [{"bytes": content, "path": None} for content in contents],
        "kind": [number % 2 for number in range(6)],
        "other": ["x"] * 6,
    }
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "saved"))
    settings = {"image_column": "picture", "label_column": "kind", "max_skipped": 0.2}
    found = shard(tmp_path / "out", tmp_path / "saved", **settings)
    assert found == {
        f"row-{number:08d}": {"jpg": contents[number], "cls": str(number % 2).encode()}
        for number in range(6)
        if number != 3
    }
    dataset = read_json(tmp_path / "out" / "dataset.json")
    assert dataset["classes"] == ["ant", "bee"] and dataset["skipped"] == {"not_an_image": 1}
    assert len(shard(tmp_path / "test", tmp_path / "saved", split="test", **settings)) == 1
    unlabelled = shard(tmp_path / "unlabelled", tmp_path / "saved", **{**settings, "label_column": ""})
    assert unlabelled["row-00000000"] == {"jpg": contents[0]}
    for wrong, message in (
        ({"image_column": "image"}, "--image_column image: the columns of .* are picture, kind, other"),
        ({"label_column": "label"}, "--label_column label: .*--label_column ''"),
        ({"label_column": "other"}, "whole numbers expected"),
        ({"split": "val"}, "split 'val' not found"),
    ):
        with pytest.raises(DataError, match=message):
            shard(tmp_path / "wrong", tmp_path / "saved", **{**settings, **wrong})
