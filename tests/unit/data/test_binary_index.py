"""The binary index: the same data set as from the JSON indexes, and a stale or damaged one is refused."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data import stored
from tests.unit.data.images import stored as images
from tests.unit.data.images.foreign_tars import index
from tests.unit.data.loaded import whole_member
from trp_scale.data import binary_index
from trp_scale.data.binary_index import NAME, find_index
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.index import index_path, read_json, write_json
from trp_scale.data.plan import TrainPlan
from trp_scale.data.samples import read_samples
from trp_scale.data.tar_reader import SampleReader
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.errors import DataError
from trp_scale.sharding.parts import write_dataset_index
from trp_scale.sharding.verify import verify_dataset


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return images.small_images(tmp_path / "images")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return stored.write_dataset(tmp_path / "text", block_rows=[[2, 3, 5], [4], [1, 6]])


def assert_tables_equal(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        if field.name in ("index", "store", "samples", "blocks"):
            continue
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.tolist() == theirs.tolist(), field.name
        else:
            assert list(ours) == list(theirs) if field.name in ("keys", "shards") else ours == theirs, field.name


def test_images_are_the_same_with_it(pictures: Path) -> None:
    plain = open_image_dataset(pictures)
    mapped = open_image_dataset(index(pictures))
    assert plain.samples.index is None and mapped.samples.index is not None
    assert_tables_equal(plain.samples, mapped.samples)
    assert_tables_equal(plain.blocks, mapped.blocks)
    assert plain.blocks.keys[2:9:3] == mapped.blocks.keys[2:9:3] and mapped.blocks.keys[-1] == plain.blocks.keys[-1]
    assert plain.digest() == mapped.digest()
    assert [mapped.samples.key(number) for number in (0, 20, 33)] == [plain.samples.key(n) for n in (0, 20, 33)]
    assert SampleReader(mapped.samples, verify=True).members(20) == SampleReader(plain.samples, verify=True).members(20)


def test_text_is_the_same_with_it(text: Path) -> None:
    plain = open_text_dataset(text)
    mapped = open_text_dataset(index(text))
    assert plain.blocks.index is None and mapped.blocks.index is not None
    assert_tables_equal(plain.blocks, mapped.blocks)
    assert plain.digest() == mapped.digest()


def test_maps_beside_images_and_members_that_are_not_read(tmp_path: Path) -> None:
    """Columns of the first and the last of three members, and one of a directory of maps."""
    samples = [
        images.sample(number, 8, 8, **{"depth.png": bytes([number]) * 3, "semseg.png": bytes([number]) * 5})
        for number in range(5)
    ]
    order = ("jpg", "depth.png", "cls", "semseg.png")
    directory = images.write_images(tmp_path / "data", [samples], changes={"suffixes": list(order)})
    binary = find_index(index(directory) / "shards")
    assert binary is not None
    for opened in (("jpg", "cls"), ("jpg", "semseg.png"), order, ("jpg", "depth.png", "semseg.png"), ("cls", "jpg")):
        table, _ = read_samples(directory / "shards", ["image-000000.tar"], order, 4, opened=opened)
        assert table.index is not None
        members = SampleReader(table, verify=True).members(3)
        assert [bytes(content) for content in members] == [samples[3][suffix] for suffix in opened]


def test_workers_map_the_file_themselves(tmp_path: Path) -> None:
    samples = [images.sample(number, 1, 1) for number in range(400)]
    dataset = open_image_dataset(index(images.write_images(tmp_path / "data", [samples])))
    plan = TrainPlan(seed=0, members=[whole_member(dataset.blocks)], blocks_per_group=4)
    assert len(pickle.dumps((dataset.samples, dataset.blocks, plan))) < 2_500  # arrays: 400 x 40 + 100 x 20 bytes
    places = np.arange(900)
    assert pickle.loads(pickle.dumps(plan)).locate(places).keys.tolist() == plan.locate(places).keys.tolist()
    content = pickle.dumps((dataset.samples, dataset.blocks))
    samples_there, blocks_there = pickle.loads(content)
    assert_tables_equal(dataset.samples, samples_there)
    assert_tables_equal(dataset.blocks, blocks_there)


def replaced_tar(directory: Path) -> None:
    tar = directory / "shards" / "image-000001.tar"
    tar.write_bytes(tar.read_bytes() + bytes(512))


def replaced_json(directory: Path) -> None:
    path = index_path(directory / "shards" / "image-000001.tar")
    path.write_text(path.read_text() + "\n")


def replaced_json_of_one_size(directory: Path) -> None:
    path = index_path(directory / "shards" / "image-000002.tar")
    path.write_text(path.read_text().replace('"label": 0', '"label": 1'))
    later = (directory / "shards" / NAME).stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def newer_tar_beside_an_older_json(directory: Path) -> None:
    """Both of the former sizes, as a copy that keeps the times of some files leaves them."""
    replaced_json_of_one_size(directory)
    now = (directory / "shards" / NAME).stat().st_mtime_ns
    tar = directory / "shards" / "image-000002.tar"
    os.utime(index_path(tar), ns=(now - 10**9, now - 10**9))
    os.utime(tar, ns=(now + 10**9, now + 10**9))


def missing_tar(directory: Path) -> None:
    (directory / "shards" / "image-000001.tar").unlink()


def fewer_tars(directory: Path) -> None:
    document = read_json(directory / "dataset.json")
    write_json(directory / "dataset.json", {**document, "shards": document["shards"][:2]})


def other_blocks(directory: Path) -> None:
    write_json(directory / "dataset.json", {**read_json(directory / "dataset.json"), "rows_per_block": 5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced_tar, r"image-000001\.tar: \d+ .*index\.bin .*trp-scale index .*images"),
        (replaced_json, r"image-000001\.index\.json: \d+ .*index\.bin .*trp-scale index"),
        (replaced_json_of_one_size, r"image-000002\.index\.json: .*index\.bin"),
        (newer_tar_beside_an_older_json, r"image-000002\.index\.json: .*index\.bin"),
        (missing_tar, r"image-000001\.tar"),
        (fewer_tars, r"index\.bin: .*trp-scale index"),
        (other_blocks, r"index\.bin: .* 4 .* 5 in dataset\.json"),
    ],
)
def test_a_stale_one_is_refused(pictures: Path, change: Callable[[Path], None], message: str) -> None:
    change(index(pictures))
    with pytest.raises(DataError, match=message):
        open_image_dataset(pictures)


def test_a_copy_with_newer_json_is_taken(pictures: Path, tmp_path: Path) -> None:
    """Files of a copy are younger or older than each other by chance."""
    copy = Path(shutil.copytree(index(pictures), tmp_path / "copy"))
    for path in (copy / "shards").glob("*.json"):
        later = (copy / "shards" / NAME).stat().st_mtime_ns + 10**9
        os.utime(path, ns=(later, later))
    assert open_image_dataset(copy).samples.index is not None


def test_one_rank_of_a_machine_compares_it_with_the_tars(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing_tar(index(pictures))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert open_image_dataset(pictures).meta.rows == 34
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(DataError, match=r"image-000001\.tar"):
        open_image_dataset(pictures)


def flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda content: (
        content[: place % len(content)] + bytes([content[place] ^ 1]) + content[place % len(content) + 1 :]
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flipped(0), "trp-scale index"),
        (flipped(8), "format 0 "),
        (flipped(-3), "description"),
        (lambda content: content[:-1], r"\d+ bytes"),
        (lambda content: content[:10], "index"),
    ],
)
def test_a_damaged_one_is_refused(pictures: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = index(pictures) / "shards" / NAME
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_image_dataset(pictures)


def test_damaged_numbers_are_found_by_verify_and_not_followed(pictures: Path) -> None:
    path = index(pictures) / "shards" / NAME
    first = binary_index._START.size
    for place, value in ((first + 7, 0x7F), (first + 7, 0x80), (first + 27, 0xFF)):  # offset, offset < 0, length
        content = bytearray(path.read_bytes())
        content[place] = value
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"image 0, \.jpg: "):
            SampleReader(open_image_dataset(pictures).samples, verify=False).members(0)
        with pytest.raises(DataError, match=r"index\.bin: .*'samples' "):
            verify_dataset(pictures)
        index(pictures)


def test_one_made_again_under_a_run_is_refused_by_its_workers(pictures: Path) -> None:
    dataset: ImageDataset = open_image_dataset(index(pictures))
    content = pickle.dumps(dataset.samples)
    document = {**read_json(pictures / "dataset.json"), "rows_per_block": 7}
    write_dataset_index(pictures, document)
    with pytest.raises(DataError, match=r"index\.bin"):
        pickle.loads(content)
