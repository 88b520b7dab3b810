"""Reading blocks: nothing is unpickled, damage is found, only listed members are opened."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.images.stored import SIZES, sample, small_images, write_images, write_tar
from tests.unit.data.stored import Trap, config_for, dataset_with, members, npy, write_dataset
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import index_path
from trp_scale.data.samples import read_samples
from trp_scale.data.tar_reader import ArrayReader, SampleReader, parse_npy
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "tokens.pyd"])
def test_pickled_member_is_refused_and_not_unpickled(tmp_path: Path, suffix: str) -> None:
    planted = {**members(), suffix: pickle.dumps(Trap(tmp_path / "caught"))}
    dataset = dataset_with(tmp_path / "data", a=members(), b=planted)
    with pytest.raises(DataError, match=rf"text-000000\.tar: block b .*\.{suffix}; .*\.tokens\.npy"):
        open_sources(config_for(dataset), rank=0, world=1)
    assert not (tmp_path / "caught").exists()


def test_pickled_member_that_the_index_does_not_list_is_never_opened(tmp_path: Path) -> None:
    planted = {**members(), "pyd": pickle.dumps(Trap(tmp_path / "caught"))}
    dataset = dataset_with(tmp_path / "data", a=planted)
    index = index_path(dataset / "shards" / "text-000000.tar")
    document = json.loads(index.read_text())
    del document["blocks"][0]["members"]["pyd"]
    index.write_text(json.dumps(document))
    sources = open_sources(config_for(dataset, batch={"global_size": 2, "micro_size": 2}), rank=0, world=1)
    assert sources.train.next_window()[0]["row_weights"].tolist() == [1.0, 1.0]
    assert not (tmp_path / "caught").exists()


def test_npy_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    objects = np.empty(2, dtype=object)
    objects[:] = [Trap(tmp_path / "caught")] * 2
    path = tmp_path / "objects.npy"
    np.save(path, objects, allow_pickle=True)
    dataset = dataset_with(tmp_path / "data", a={**members(), "tokens.npy": path.read_bytes()}, b=members())
    config = config_for(dataset, batch={"global_size": 4, "micro_size": 4})
    (batch,) = open_sources(config, rank=0, world=1).train.next_window()
    assert batch.corrupt == ["a"]
    assert sorted(batch["row_weights"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    assert not (tmp_path / "caught").exists()


def test_reader_gives_what_was_stored_and_pickles_without_maps(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", block_rows=[[2, 3], [4]])
    table, blocks = read_samples(dataset / "shards", ["text-000000.tar", "text-000001.tar"], SUFFIXES, None)
    reader = ArrayReader(table, blocks, verify=True, keep=1)  # fewer than are read: closes and opens again
    for _ in range(2):
        for block, key in enumerate(blocks.keys):
            tokens, tags, sentences = reader.arrays(block)
            assert len(tokens) == len(tags) == len(sentences) == blocks.rows[block], key
            content = table.shards[table.shard_number(block)].read_bytes()
            first = int(table.offsets[block, 0])
            assert zlib.crc32(content[first : first + int(table.lengths[block, 0])]) == table.checksums[block, 0]
            assert content[first:][: int(table.lengths[block, 0])].endswith(tokens.tobytes())
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.arrays(1)[0].tolist() == reader.arrays(1)[0].tolist()
    assert len(pickle.dumps(reader)) < 10_000


def test_shard_that_changes_under_way_is_a_damaged_block(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", block_rows=[[2]])
    table, blocks = read_samples(dataset / "shards", ["text-000000.tar"], SUFFIXES, None)
    shard = table.shards[0]
    for content in (shard.read_bytes()[:1000], b""):
        shard.write_bytes(content)
        with pytest.raises(DataError, match=r"text-000000\.tar"):
            ArrayReader(table, blocks, verify=False).arrays(0)
    shard.unlink()
    with pytest.raises(DataError, match=r"text-000000\.tar"):
        ArrayReader(table, blocks, verify=False).arrays(0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"not an array at all" * 10,
        npy(np.zeros((2, 3)))[:-1],
        npy(np.zeros((2, 3))) + b"x",
        npy(np.asfortranarray(np.zeros((2, 3)))),
        npy(np.zeros(2, dtype=">i4")),
        npy(np.zeros(2, dtype="S4")),
        npy(np.zeros(2, dtype=[("a", "u1")])),
        npy(np.zeros((2, 3))).replace(b"}", b"|"),  # numpy: TokenError, as it would be of any unfinished Python
        npy(np.zeros((2, 3))).replace(b"(2, 3), }" + b" " * 18, b"(99999999999999999999, 3), }"),
        npy(np.zeros((2, 3))).replace(b"(2, 3), }  ", b"(-2, -3), }"),
    ],
)
def test_bad_npy_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"^here: "):
        parse_npy(memoryview(content), "here")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_images(tmp_path_factory.mktemp("images") / "data")


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
    with pytest.raises(DataError, match=rf"image-000000\.tar: image 2, \.jpg: 100 .* {length} "):
        SampleReader(dataset.samples, verify=False).members(2)
    shard.unlink()
    with pytest.raises(DataError, match=r"image-000000\.tar"):
        SampleReader(dataset.samples, verify=False).members(2)


def test_an_index_that_shrank_is_named(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[sample(0, 8, 8), sample(1, 8, 8)]])
    table = open_image_dataset(data).samples
    write_tar(data / "shards" / "image-000000.tar", [sample(0, 8, 8)])
    with pytest.raises(DataError, match=r"image-000000\.tar: 1 "):
        table.key(1)
