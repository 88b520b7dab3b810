"""Test sets: marked when they are sharded, refused where masks are learned, told by their images where accuracy is
measured."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.unit.data.images.source_images import class_folder
from tests.unit.data.images.stored import config_for, sample, small_images, write_images
from tests.unit.data.stored import write_dataset
from trp_scale.config import RefusedError
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.images.leakage import check_test, is_test_set, refuse_shared_images, shared_images
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources
from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images


def shard(output: Path, **settings: object) -> Path:
    arguments = {"rows_per_block": 2, "processes": 1, "progress": False, "max_skipped": 1.0, **settings}
    return shard_images(ShardImagesConfig(output=output, **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "kept"),
    [
        *((name, True) for name in ("test", "val", "Validation", "dev", "test2017", "my-test", "train+test", "eval_1")),
        *((name, False) for name in ("train", "train2017", "unlabeled", "extra", "contest", "")),
    ],
)
def test_names_of_splits(split: str, kept: bool) -> None:
    assert is_test_set(split) == kept


@pytest.mark.parametrize("kind", ["folder", "tars", "embedded"])
def test_any_input_can_be_marked_and_is_then_refused(tmp_path: Path, kind: str) -> None:
    if kind == "embedded":
        settings: dict[str, object] = {"embedded": True, "count": 40, "size": 16}
    elif kind == "tars":
        settings = {"inputs": [str(small_images(tmp_path / "from") / "shards")]}
    else:
        settings = {"inputs": [str(class_folder(tmp_path / "from"))]}
    path = shard(tmp_path / "data", split="test", **settings)
    learned = config_for(path, multilevel={"kind": "reconstruction"})
    with pytest.raises(
        RefusedError, match=rf"^{path}: .* split 'test' .* --multilevel.kind reconstruction .* such as train"
    ):
        open_sources(learned, rank=0, world=1)
    with pytest.raises(RefusedError, match="kept for a test"):
        open_sources(config_for(f"a:0.5={path},b:0.5={path}", multilevel={"kind": "head"}), rank=0, world=1)
    assert open_sources(config_for(path), rank=0, world=1).train.rows > 0  # without learned masks, as ever
    assert shard(path, split="test", **settings) == path  # finished
    other = shard(tmp_path / "train", **settings)
    learned.data.path = str(other)
    assert open_sources(learned, rank=0, world=1).train.rows > 0
    with pytest.raises(DataError, match=r"split ('train'|None) there, 'test' asked for"):
        shard(other, split="test", **settings)
    assert [file.read_bytes() for file in sorted((path / "shards").iterdir())] == [
        file.read_bytes() for file in sorted((other / "shards").iterdir())
    ]


def test_a_set_that_was_never_marked_is_a_training_set(tmp_path: Path) -> None:
    path = shard(tmp_path / "data", embedded=True, count=40, size=16)
    assert "split" not in read_json(path / "dataset.json")["settings"]  # scenes are what they were before
    assert open_image_dataset(path).split == "train"
    assert open_image_dataset(small_images(tmp_path / "without settings")).split == "train"


def test_shared_images_are_told_by_their_bytes(tmp_path: Path) -> None:
    train = write_images(tmp_path / "train", [[sample(number, 16, 16) for number in range(30)]])
    more = write_images(tmp_path / "more", [[sample(number, 16, 16) for number in range(30, 40)]])
    samples = [sample(number, 16, 16) for number in range(100, 400)]
    for place, number in ((7, 12), (100, 33), (299, 0)):  # under another name, of another class
        samples[place] = sample(place + 100, 16, 16, jpg=sample(number, 16, 16)["jpg"])  # type: ignore[arg-type]
    test = open_image_dataset(write_images(tmp_path / "test", [samples[:50], samples[50:]]))
    datasets = [open_image_dataset(train), open_image_dataset(more)]
    shared = sorted(shared_images(datasets, test))
    assert shared == [
        "image-000000/n00107",
        "image-000001/n00200",
        "image-000001/n00399",
    ]
    assert shared_images(datasets[:1], open_image_dataset(more)) == []
    assert refuse_shared_images(datasets, test) == 3  # of 300: one in a hundred
    smaller = open_image_dataset(write_images(tmp_path / "smaller", [samples[1:]]))
    with pytest.raises(RefusedError, match=rf"smaller: 3 of its 299 .*{train}, {more}.*image-000000/n00107"):
        refuse_shared_images(datasets, smaller)
    with pytest.raises(RefusedError, match="30 of its 30 images"):
        refuse_shared_images(datasets, datasets[0])


def test_equal_checksums_are_not_equal_images(tmp_path: Path) -> None:
    """Two images that differ; their indexes are made to say one length and one checksum."""
    first = open_image_dataset(write_images(tmp_path / "first", [[sample(1, 16, 16)]]))
    second = open_image_dataset(write_images(tmp_path / "second", [[sample(2, 16, 16)]]))
    shorter = min(int(each.samples.lengths[0, 0]) for each in (first, second))
    for each in (first, second):
        each.samples.checksums[:, 0], each.samples.lengths[:, 0] = 7, shorter
    assert shared_images([first], second) == []
    assert shared_images([first], first) == ["image-000000/n00001"]


def write(path: Path, numbers: range, **changes: object) -> Path:
    return write_images(path, [[sample(number, 16, 16) for number in numbers]], changes=changes)


def test_what_says_nothing_of_a_run_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train", range(30))
    config = config_for(train)
    check_test(config, write(tmp_path / "test", range(30, 40), settings={"split": "test"}))
    for path, message in (
        (train, "30 of its 30 images are in the run's data"),
        (
            write(tmp_path / "overlap", range(29, 39)),
            "1 of its 10 images are in the run's data .*image-000000/n00029",
        ),
        (
            write(tmp_path / "renamed", range(30, 40), classes=["ant", "cat", "bee"]),
            "classes 3 .ant, cat, bee. found",
        ),
        (write(tmp_path / "unnamed", range(30, 40), classes=None), r"classes without names found, .* 3 \(ant, bee"),
        (write_dataset(tmp_path / "text", block_rows=[[5]]), "kind 'text' found, 'image' allowed"),
        (tmp_path / "nowhere", "--test .*nowhere: no such file"),
    ):
        with pytest.raises(RefusedError, match=message):
            check_test(config, path)
    bare = [{name: value for name, value in sample(number, 8, 8).items() if name != "cls"} for number in range(50, 60)]
    with pytest.raises(RefusedError, match=r"--test .*bare"):
        check_test(config, write_images(tmp_path / "bare", [bare], changes={"suffixes": ["jpg"]}))
    mixture = config_for(f"a:0.5={write(tmp_path / 'more', range(60, 70))},b:0.5={train}")
    with pytest.raises(RefusedError, match="10 of its 10"):
        check_test(mixture, write(tmp_path / "again", range(5, 15)))


def test_classes_without_names_are_compared_by_number(tmp_path: Path) -> None:
    config = config_for(write(tmp_path / "train", range(30), classes=None))
    check_test(config, write(tmp_path / "test", range(30, 40), classes=None))
    samples = [sample(number, 16, 16, cls=b"3") for number in range(50, 60)]
    with pytest.raises(RefusedError, match=r"class 3 .*--data\.path is 2"):
        check_test(config, write_images(tmp_path / "more", [samples], changes={"classes": None}))


def test_a_few_images_in_common_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(write(tmp_path / "train", range(30)))
    with caplog.at_level(logging.WARNING):
        check_test(config, write(tmp_path / "test", range(29, 129)))
    assert "test: 1 of its 100 images are also in the run's data" in caplog.text
