"""Parts made by several runs merge to the bytes of a single run, or the merge is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import small_image_config, small_text_config
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.shard import shard_images
from trp_scale.sharding.parts import Part, started_parts
from trp_scale.sharding.text.shard import shard_text
from trp_scale.sharding.verify import merge
from trp_scale.storage.files import only_run

ROOT = Path(__file__).resolve().parents[4]


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def text_part(text: Path, output: Path, index: int, count: int = 3, **changes: Any) -> None:
    """Make a part with the settings of `text`."""
    shard_text(small_text_config(text.with_suffix(".jsonl"), output, shard_index=index, num_shards=count, **changes))


def image_part(output: Path, index: int, parts: int = 3, **changes: Any) -> None:
    changes = {"count": 48, "samples_per_shard": 8, "shard_index": index, "num_shards": parts, **changes}
    shard_images(small_image_config(output, **changes))


def test_missing_parts_are_named_and_parts_in_any_order_are_the_same_data_set(
    text_dataset: Path, tmp_path: Path
) -> None:
    output = tmp_path / "data"
    text_part(text_dataset, output, 1)
    (output / "shards" / ".text-000002.tar.elsewhere-1-0.tmp").write_bytes(b"half of one, of a host that was lost")
    with pytest.raises(DataError) as raised:
        merge(output)
    for flags in ("--shard_index 0 --num_shards 3", "--shard_index 2 --num_shards 3"):
        assert flags in str(raised.value)
    text_part(text_dataset, output, 2)
    text_part(text_dataset, output, 0)
    (output / "shards" / "text-000001.tar").write_bytes(b"cut short by a full disk")
    with pytest.raises(DataError, match=r"--shard_index 1 --num_shards 3 .*text-000001"):
        merge(output)
    assert not (output / "dataset.json").exists()
    text_part(text_dataset, output, 1)
    assert not (output / "dataset.json").exists()
    merge(output)
    assert content(output) == content(text_dataset)
    merge(output)
    text_part(text_dataset, output, 1)  # of a finished data set nothing is left to do
    assert content(output) == content(text_dataset)


def test_parts_of_other_settings_are_refused(text_dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "data"
    text_part(text_dataset, output, 0)
    before = content(output)
    with pytest.raises(DataError, match="rows_per_block 16 there, 8 asked for"):
        text_part(text_dataset, output, 1, rows_per_block=8)
    with pytest.raises(DataError, match="--num_shards 4"):
        text_part(text_dataset, output, 1, 4)
    with pytest.raises(DataError, match="--num_shards 1"):
        text_part(text_dataset, output, 0, 1)
    assert content(output) == before
    text_part(text_dataset, output, 1)
    text_part(text_dataset, output, 2)
    path = Part(index=2, count=3).path(output)
    document = read_json(path)
    for changed in ({"settings": {**document["settings"], "length": 32}}, {"max_skipped": 0.5}, {"shards": 2}):
        path.write_text(json.dumps({**document, **changed}))
        with pytest.raises(DataError, match="part 2 of 3"):
            merge(output)
    assert not (output / "dataset.json").exists()


def test_parts_that_begin_together_with_other_settings_are_not_both_made(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other part writes its settings after this part has checked for them."""
    output = tmp_path / "data"
    part = Part(index=1, count=3)
    theirs = {"kind": "text", "settings": {"length": 9}, "shards": 3, "max_skipped": 0.1}
    write = type(part).write

    def slow(self: Any, directory: Path, document: dict[str, object]) -> None:
        write(self, directory, document)
        write(part, directory, theirs)  # type: ignore[arg-type]

    monkeypatch.setattr(type(part), "write", slow)
    with pytest.raises(DataError, match="length 9 there, 64 asked for"):
        text_part(text_dataset, output, 0)
    assert list(started_parts(output)) == [part]


def test_a_part_at_work_is_not_made_twice_nor_merged(text_dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "data"
    for index in range(2):
        text_part(text_dataset, output, index, 2)
    with only_run(output, Part(index=1, count=2).lock):
        before = content(output)
        with pytest.raises(DataError, match=r"part-00001-of-00002\.lock"):
            text_part(text_dataset, output, 1, 2)
        with pytest.raises(DataError, match=r"part-00001-of-00002\.lock"):
            merge(output)
        assert content(output) == before, "nothing was written"
        text_part(text_dataset, output, 0, 2)
    merge(output)


@pytest.mark.parametrize(("index", "count", "flag"), [(3, 3, "shard_index 3"), (-1, 3, "shard_index"), (0, 0, "num_")])
def test_parts_that_there_are_not_are_refused(tmp_path: Path, index: int, count: int, flag: str) -> None:
    with pytest.raises(DataError, match=f"--{flag}"):
        image_part(tmp_path / "data", index, count)
    with pytest.raises(DataError, match="--coco"):
        image_part(tmp_path / "data", 0, 2, coco=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        merge(tmp_path / "empty")
