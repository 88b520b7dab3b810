"""Opening an image data set: what is read, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.images.stored import CLASSES, SIZES, config_for, sample, small_images, write_images, write_tar
from tests.unit.data.stored import config_for as text_config_for
from tests.unit.data.stored import write_dataset
from trp_scale.config import RefusedError
from trp_scale.data.hashing import name_hash
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_json, write_json
from trp_scale.data.tar_reader import SampleReader
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_images(tmp_path_factory.mktemp("images") / "data")


def test_blocks_are_consecutive_images_of_one_shard(images: Path) -> None:
    dataset = open_image_dataset(images)
    assert dataset.meta.rows == dataset.samples.rows == 34
    assert dataset.meta.classes == tuple(CLASSES) and dataset.meta.suffixes == ("jpg", "cls")
    blocks = dataset.blocks
    assert blocks.keys[:5] == [
        "image-000000/0",
        "image-000000/4",
        "image-000000/8",
        "image-000000/12",
        "image-000001/0",
    ]
    assert blocks.rows.tolist() == [4, 4, 4, 2, 4, 3, 4, 4, 4, 1]
    assert blocks.first.tolist() == [0, 4, 8, 12, 14, 18, 21, 25, 29, 33]
    assert blocks.identities.tolist() == [name_hash(key) for key in blocks.keys]


def test_columns_hold_what_is_read_and_names_come_from_the_index(images: Path) -> None:
    table = open_image_dataset(images).samples
    reader = SampleReader(table, verify=True, keep=1)  # fewer than there are: closes and opens again
    for number in (33, 0, 14, 13, 20, 21):
        (image,) = reader.members(number)
        assert bytes(image) == sample(number, *SIZES[number % len(SIZES)])["jpg"]
        assert table.labels[number] == number % 3
        assert table.key(number) == f"{table.shards[table.shard_number(number)].stem}/n{number:05d}"
    assert len(pickle.dumps(table)) < 5000  # no names: a process holds numbers only
    assert table.offsets.shape == table.lengths.shape == table.checksums.shape == (34, 1)
    assert [array.itemsize for array in (table.offsets, table.lengths, table.checksums)] == [8, 4, 4]


def test_a_reader_opens_its_own_files_after_pickling(images: Path) -> None:
    reader = SampleReader(open_image_dataset(images).samples, verify=True)
    first = reader.members(3)
    stored = pickle.dumps(reader)
    del reader  # closes its files
    assert pickle.loads(stored).members(3) == first


def test_members_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    samples = [sample(number, 8, 8) for number in range(3)]
    dataset = open_image_dataset(write_images(tmp_path / "data", [samples], changes={"classes": None}))
    shard = tmp_path / "data" / "shards" / "image-000000.tar"
    start, length = (int(column[2, 0]) for column in (dataset.samples.offsets, dataset.samples.lengths))
    shard.write_bytes(shard.read_bytes()[: start + 100])
    with pytest.raises(DataError, match=rf"image-000000\.tar: image 2, \.jpg: 100 bytes found, {length} expected"):
        SampleReader(dataset.samples, verify=False).members(2)
    shard.unlink()
    with pytest.raises(DataError, match=r"image-000000\.tar"):
        SampleReader(dataset.samples, verify=False).members(2)


def test_members_of_other_objectives_are_known_but_not_opened(tmp_path: Path) -> None:
    samples = [sample(number, 8, 8, **{"depth.png": b"16 bits", "semseg.png": b"8 bits"}) for number in range(3)]
    suffixes = ["jpg", "semseg.png", "cls", "depth.png"]
    data = write_images(tmp_path / "data", [samples], changes={"suffixes": suffixes})
    dataset = open_image_dataset(data)
    assert dataset.samples.suffixes == ("jpg",) and dataset.meta.suffixes == tuple(suffixes)
    (jpg,) = SampleReader(dataset.samples, verify=True).members(2)
    assert bytes(jpg) == samples[2]["jpg"] and dataset.samples.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "png", "npy"])
def test_other_members_refuse_the_shard(tmp_path: Path, suffix: str) -> None:
    write_images(tmp_path / "data", [[sample(0, 8, 8), sample(1, 8, 8, **{suffix: b"x"})]])
    with pytest.raises(
        DataError, match=rf"image-000000\.tar: block n00001 has member \.{suffix}; allowed are .jpg, .cls"
    ):
        open_image_dataset(tmp_path / "data")
    document = read_json(tmp_path / "data" / "dataset.json")
    write_json(tmp_path / "data" / "dataset.json", {**document, "suffixes": ["jpg", "cls", suffix]})
    with pytest.raises(DataError, match=rf"suffix '{suffix}' found; allowed are jpg, cls, depth.png, semseg.png"):
        open_image_dataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2 found, 1 expected"),
        ({"kind": "sound"}, "kind 'sound' found, 'image' expected"),
        ({"rows_per_block": 0}, "rows_per_block is 0"),
        ({"rows": 33}, "33 rows written there, 34 images found"),
        ({"suffixes": ["cls"]}, "no suffix 'jpg' found"),
        ({"suffixes": ["jpg", "cls", "depth.png"]}, r"has no member .depth.png"),
        ({"shards": ["image-000000.tar", "image-000000.tar"]}, "listed twice"),
        ({"shards": []}, "0 shards"),
        ({"classes": 5}, r"dataset\.json: classes 5 found, a list of names expected, .* or null"),
        ({"classes": "wall"}, r"dataset\.json: classes 'wall' found, a list of names expected"),
        ({"modalities": ["depth"]}, r"dataset\.json: modalities \['depth'\] found, descriptions by name expected"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_image_dataset(small_images(tmp_path / "data", **changes))


def test_a_shard_that_differs_from_its_index_is_refused(tmp_path: Path) -> None:
    data = small_images(tmp_path / "data")
    shard = data / "shards" / "image-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    with pytest.raises(DataError, match=r"image-000001\.tar: \d+ bytes found"):
        open_image_dataset(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "n00000"}, "key 'n00000' comes twice"),
        ({"rows": 2}, "n00001: 2 rows"),
        ({"members": {"jpg": {"offset": 0, "length": 9, "crc32": 0}}}, r"block n00001 has no member \.cls"),
        ({"members": 5}, r"000000\.index\.json: block n00001: members is 5"),
        (
            {"members": {suffix: {"offset": 0, "length": 9} for suffix in ("jpg", "cls")}},
            r"block n00001: members.cls is {.*}, allowed: .*crc32",
        ),
        (
            {"members": {suffix: {"offset": 9000, "length": 9000, "crc32": 0} for suffix in ("jpg", "cls")}},
            r"image-000000\.tar.*n00001",
        ),
        (
            {"members": {suffix: {"offset": -1, "length": 9, "crc32": 0} for suffix in ("jpg", "cls")}},
            "n00001",
        ),
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
    assert str(raised.value) == f"{path}: format 1 found, 2 expected; shard the data again"


def test_the_digest_sees_names_contents_and_blocks(tmp_path: Path) -> None:
    digests = {open_image_dataset(small_images(tmp_path / "a")).digest()}
    digests.add(open_image_dataset(small_images(tmp_path / "b")).digest())
    assert len(digests) == 1
    digests.add(open_image_dataset(small_images(tmp_path / "c", rows_per_block=5)).digest())
    digests.add(open_image_dataset(small_images(tmp_path / "d", classes=["ant", "bee", "cow"])).digest())
    samples = [sample(number, 8, 8) for number in range(3)]
    digests.add(open_image_dataset(write_images(tmp_path / "e", [samples])).digest())
    digests.add(open_image_dataset(write_images(tmp_path / "f", [[*samples[:2], sample(5, 8, 8)]])).digest())
    digests.add(open_image_dataset(write_images(tmp_path / "g", [[*samples[:2], sample(2, 8, 8, cls=b"1")]])).digest())
    renamed = {**samples[2], "__key__": "n00009"}
    digests.add(open_image_dataset(write_images(tmp_path / "h", [[*samples[:2], renamed]])).digest())
    assert len(digests) == 7


def test_the_digest_of_images_alone_stays_what_checkpoints_hold(tmp_path: Path) -> None:
    """As it was before there were modalities: another one, and runs of that time could not be resumed."""
    known = open_image_dataset(small_images(tmp_path / "known"))
    fields = "classes=('ant', 'bee', 'cat'), suffixes=('jpg', 'cls'), rows=34"
    assert known.digest() == f" ImageMeta({fields}) 4 {known.samples.digest}"
    wild = open_image_dataset(small_images(tmp_path / "wild", classes=None), "wild")
    fields = "classes=None, suffixes=('jpg', 'cls'), rows=34"
    assert wild.digest() == f"wild ImageMeta({fields}) 4 {wild.samples.digest}"


def test_recipe_and_data_of_different_kinds_are_refused(tmp_path: Path, images: Path) -> None:
    text = write_dataset(tmp_path / "text", block_rows=[[5, 7]])
    with pytest.raises(RefusedError, match=r"kind 'text' found, but this run's encoder reads kind 'image'"):
        open_sources(config_for(text), rank=0, world=1)
    with pytest.raises(RefusedError, match=r"kind 'image' found, but this run's encoder reads kind 'text'"):
        open_sources(text_config_for(images), rank=0, world=1)


def test_mixtures(tmp_path: Path, images: Path) -> None:
    unlabelled = {"classes": None, "suffixes": ["jpg"]}
    nameless = [{k: v for k, v in sample(number, 9, 9).items() if k != "cls"} for number in range(6)]
    write_images(tmp_path / "wild", [nameless], changes=unlabelled)
    sources = open_sources(config_for(f"wild:1={tmp_path / 'wild'},known:1={images}"), rank=0, world=1)
    assert sources.meta.classes == tuple(CLASSES) and sources.meta.suffixes == ("jpg",) and sources.meta.rows == 40
    labels = np.concatenate([batch["labels"].numpy() for batch in sources.train.next_window()])
    assert (labels == -1).sum() == 6 and set(labels[labels != -1]) <= {0, 1, 2}
    write_images(tmp_path / "other", [[sample(0, 8, 8)]], changes={"classes": ["x", "y"]})
    with pytest.raises(DataError, match=r"same classes: known has 3 \(ant, bee, cat\), other has 2 \(x, y\)"):
        open_sources(config_for(f"known:1={images},other:1={tmp_path / 'other'}"), rank=0, world=1)


def test_an_index_that_shrank_is_named(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[sample(0, 8, 8), sample(1, 8, 8)]])
    table = open_image_dataset(data).samples
    write_tar(data / "shards" / "image-000000.tar", [sample(0, 8, 8)])
    with pytest.raises(DataError, match=r"image-000000\.tar: 1 images in its index, 2 or more"):
        table.key(1)
