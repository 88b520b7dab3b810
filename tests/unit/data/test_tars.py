"""Of a data set that the cache cannot hold it holds blocks, and the rows are the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.faulty_server import directory, faulty_server
from tests.unit.data.images import stored as images
from tests.unit.data.images.foreign_tars import index, three_tars
from tests.unit.data.loaded import assert_same, steps
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.data import mirror
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.mirror import find_store, local_directory
from trp_scale.data.tar_reader import SampleReader
from trp_scale.data.tars import PART_MARK
from trp_scale.errors import DataError, RefusedError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "far" / "books", block_rows=[[5, 7, 4], [6, 3], [4, 3, 2], [8]])


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return images.small_images(tmp_path / "far" / "images")


def share_of(dataset: Path, share: float) -> str:
    """TRP_SCALE_CACHE_GB for a share of the tars."""
    return str(share * sum(path.stat().st_size for path in dataset.rglob("*.tar")) / 1e9)


@pytest.fixture
def server_of_this_environment() -> Iterator[None]:
    """Loader workers have the environment of the server that forks them, which an earlier test may have started."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()
    yield
    server._stop()


def held(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.tar"))


@pytest.mark.parametrize("ahead", ["0", "32"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_rows_of_text_are_the_same(
    ahead: str, workers: int, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("TRP_SCALE_CACHE_GB", share_of(text, 0.6))
    monkeypatch.setenv("TRP_SCALE_TARS_AHEAD", ahead)
    if workers:
        request.getfixturevalue("server_of_this_environment")
    ours = steps(config_for(f"file://{text}", data={"verify": True, "workers": workers}), world=2, count=6)
    assert_same(ours, steps(config_for(text), world=1, count=6))
    assert held(cache) and all(PART_MARK in path.name for path in held(cache))
    assert sum(path.stat().st_size for path in held(cache)) <= float(share_of(text, 0.6)) * 1e9


@pytest.mark.parametrize("binary", [True, False])
def test_rows_of_images_are_the_same(
    binary: bool, pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if binary:
        index(pictures)
    monkeypatch.setenv("TRP_SCALE_CACHE_GB", share_of(pictures, 0.6))
    ours = steps(images.config_for(f"file://{pictures}", data={"verify": True}), world=2, count=5)
    assert_same(ours, steps(images.config_for(pictures), world=1, count=5))
    assert held(cache) and all(PART_MARK in path.name for path in held(cache))


def whole(dataset: ImageDataset) -> list[list[bytearray]]:
    """The members of every image."""
    reader = SampleReader(dataset.samples, verify=True, blocks=dataset.blocks)
    return [reader.members(number) for number in range(dataset.samples.rows)]


def test_a_block_is_asked_for_once_and_nothing_else(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "always")
    local = open_image_dataset(pictures)
    with faulty_server(directory(pictures.parent)) as (url, faults):
        dataset = open_image_dataset(local_directory(f"{url}/images"))
        assert whole(dataset) == whole(local)
        parts = [part for block in range(len(dataset.blocks.rows)) for _, part in dataset.tars(block)]
        asked = [(path.rpartition("/")[2], span) for _, path, span in faults.asked if path.endswith(".tar") and span]
        assert sorted(asked) == sorted(
            (part.tar.name, f"bytes={part.part.start}-{part.part.stop - 1}") for part in parts if part.part is not None
        )
        assert len(asked) == len(parts) == len(held(cache)) == 10
        before = faults.gets(".tar")
        assert whole(dataset) == whole(local) and faults.gets(".tar") == before


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_part_is_fetched_again(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "always")
    dataset = open_image_dataset(local_directory(f"file://{pictures}"))
    expected = whole(dataset)
    path = held(cache)[0]
    content = bytearray(path.read_bytes())
    content[3] ^= 1  # of its first image
    path.write_bytes({"flipped": content, "cut": path.read_bytes()[:-1], "empty": b""}[damage])
    assert whole(open_image_dataset(local_directory(f"file://{pictures}"))) == expected


def test_damage_of_the_stored_data_counts_after_a_second_fetch(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "always")
    for tar in pictures.rglob("*.tar"):
        content = bytearray(tar.read_bytes())
        content[600] ^= 1
        tar.write_bytes(content)
    with pytest.raises(DataError, match=r"image 0, \.jpg"):
        whole(open_image_dataset(local_directory(f"file://{pictures}")))


def test_tars_of_others_are_read_in_parts(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tars(tmp_path / "far")
    index(f"file://{tmp_path}/far", tmp_path / "data", "--rows_per_block", "4")
    expected = whole(open_image_dataset(tmp_path / "data"))
    assert not any(PART_MARK in path.name for path in held(cache)) and held(cache)
    shutil.rmtree(cache)
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "always")
    assert whole(open_image_dataset(tmp_path / "data")) == expected
    assert len(held(cache)) == 6 and all(PART_MARK in path.name for path in held(cache))
    # Those on this machine's disks are read where they lie, whatever is set.
    index(tmp_path / "far", tmp_path / "near", "--rows_per_block", "4")
    assert whole(open_image_dataset(tmp_path / "near")) == expected
    assert len(held(cache)) == 6


def test_parts_of_tars_that_have_changed_go(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "always")
    config = config_for(f"file://{text}", data={"verify": True})
    steps(config, world=1, count=4)
    shutil.rmtree(text)
    write_dataset(text, block_rows=[[5, 7, 4], [6, 3], [4, 3, 2], [8]], seed=1)  # other content, the same sizes
    os.utime(local_directory(f"file://{text}") / "remote.json", (1, 1))
    mirror._update_mirror.cache_clear()
    assert_same(steps(config, world=1, count=4), steps(config_for(text), world=1, count=4))


def test_the_choice_is_by_size_unless_one_is_made(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = local_directory(f"file://{text}") / "shards" / "text-000000.tar"
    store = find_store(far.parent)
    monkeypatch.setenv("TRP_SCALE_CACHE_GB", "0.000001")
    for choice, expected in (("auto", (False, True)), ("", (False, True)), ("always", (True, True))):
        monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", choice)
        assert (store.reads_parts(far, 1000), store.reads_parts(far, 1001)) == expected
    near = text / "shards" / "text-000000.tar"
    assert not find_store(near.parent).reads_parts(near, 1 << 40)
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "never")
    assert not store.reads_parts(far, 1 << 40)
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "perhaps")
    with pytest.raises(RefusedError, match=r"TRP_SCALE_CACHE_PARTS.*perhaps"):
        store.reads_parts(far, 1000)


def test_an_index_that_leads_out_of_its_tar(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "always")
    dataset = open_image_dataset(local_directory(f"file://{pictures}"))
    dataset.samples.offsets[5, 0] = 1 << 40
    with pytest.raises(DataError, match=r"image-000000\.tar: .*\d+ to \d+ .*\d+ bytes"):
        whole(dataset)
