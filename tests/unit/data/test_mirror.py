"""A data set under a URL trains as the same one on a local disk does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faulty_server import directory, faulty_server
from tests.unit.data.images.stored import sample, write_images
from tests.unit.data.loaded import assert_same, steps
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.data import mirror, tar_reader
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.mirror import local_directory
from trp_scale.data.mixture import parse_paths
from trp_scale.data.samples import write_binary_index
from trp_scale.data.tar_reader import SampleReader
from trp_scale.data.text.dataset import SUFFIXES
from trp_scale.errors import DataError, RefusedError
from trp_scale.pretraining.base import open_sources
from trp_scale.storage.transfer import DataReplacedError


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "far" / "books", block_rows=[[5, 7], [6], [4, 3, 2], [8]])


def as_new_process() -> None:
    mirror._update_mirror.cache_clear()


def look_again(path: Path) -> None:
    """The ranks of the last launch started some time ago."""
    os.utime(path / "remote.json", (1, 1))
    as_new_process()


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_the_local_data_set(workers: int, stored: Path, cache: Path) -> None:
    url = f"file://{stored}"
    ours = steps(config_for(url, data={"workers": workers}), world=2, count=4)
    assert_same(ours, steps(config_for(stored), world=1, count=4))
    place = cache.joinpath("file", *stored.parts[1:])
    assert local_directory(url) == place
    assert sorted(path.name for path in (place / "shards").glob("*.tar")) == [f"text-00000{n}.tar" for n in range(4)]
    here, there = (open_sources(config_for(path), rank=0, world=1) for path in (url, stored))
    assert here.digest() == there.digest(), "a run that began on one goes on on the other"


def test_one_index_comes_in_place_of_one_for_each_tar(stored: Path) -> None:
    names = json.loads((stored / "dataset.json").read_text())["shards"]
    write_binary_index(stored / "shards", names, SUFFIXES, None)
    url = f"file://{stored}"
    assert_same(steps(config_for(url), world=1, count=4), steps(config_for(stored), world=1, count=4))
    here = local_directory(url)
    assert (here / "shards" / "index.bin").read_bytes() == (stored / "shards" / "index.bin").read_bytes()
    assert not list(here.rglob("*.index.json")) and not list(here.rglob("*.tmp"))
    with (stored / "shards" / names[0]).open("ab") as tar:
        tar.write(b"more")
    look_again(here)
    with pytest.raises(DataError, match=r"text-000000.tar: \d+ .*index.bin .*\d+ bytes"):
        steps(config_for(url), world=1, count=1)


def test_few_tars_are_kept_open_that_the_cache_cannot_hold_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is open keeps its room on the disk when the cache removes it."""
    monkeypatch.setattr(tar_reader, "OPEN_IN_CACHE", 2)
    far = write_images(tmp_path / "far", [[sample(number, 8, 8)] for number in range(5)])
    size = sum(path.stat().st_size for path in far.rglob("*.tar"))
    for where, bound, expected in ((str(far), 1, 5), (f"file://{far}", 0.7 * size, 2), (f"file://{far}", size, 5)):
        monkeypatch.setenv("TRP_SCALE_CACHE_GB", str(bound / 1e9))
        found = SampleReader(open_image_dataset(local_directory(where)).samples, verify=True)
        for number in (0, 1, 2, 3, 4, 0):
            assert found.members(number)[0] == sample(number, 8, 8)["jpg"]
        assert len(found._files) == expected


@pytest.mark.parametrize("damage", [lambda content: content[:-512], lambda content: bytes(len(content))])
def test_a_damaged_tar_of_the_cache_is_fetched_again(
    stored: Path, cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    url = f"file://{stored}"
    expected = steps(config_for(url), world=1, count=4)
    tars = sorted(cache.rglob("*.tar"))
    for tar in tars:
        tar.write_bytes(damage(tar.read_bytes()))
    assert_same(steps(config_for(url), world=1, count=4), expected)
    assert [tar.read_bytes() for tar in tars] == [path.read_bytes() for path in sorted(stored.rglob("*.tar"))]


@pytest.mark.parametrize("listing", [True, False])
def test_a_job_from_before_a_replacement_stores_nothing_of_the_new_data(
    stored: Path, cache: Path, listing: bool
) -> None:
    with faulty_server(directory(stored.parent)) as (served, _):
        url = f"file://{stored}" if listing else f"{served}/books"
        before = open_sources(config_for(url), rank=0, world=1)
        shutil.rmtree(stored)
        write_dataset(stored, block_rows=[[5, 7, 9], [6, 2], [4, 3, 2, 8], [8, 1]], seed=1)
        with pytest.raises(DataReplacedError):
            before.train.next_window()
        assert not list(cache.rglob("*.part")) and not (listing and list(cache.rglob("*.tar")))
        look_again(local_directory(url))
        assert_same(steps(config_for(url), world=1, count=4), steps(config_for(stored), world=1, count=4))


def test_over_http_with_failures(stored: Path, cache: Path) -> None:
    with faulty_server(directory(stored.parent)) as (url, faults):
        faults.of = {
            "dataset.json": ["500"],
            "text-000001.index.json": ["cut", "503"],
            "text-000001.tar": ["503", "close", "cut", "short"],
        }
        ours = steps(config_for(f"{url}/books"), world=1, count=4)
        assert_same(ours, steps(config_for(stored), world=1, count=4))
        assert faults.gets("text-000002.tar") == 1, "fetched once, and read from the cache from then on"
        as_new_process()
        look_again(cache / "http" / url.removeprefix("http://") / "books")
        before = faults.gets(".index.json")
        steps(config_for(f"{url}/books"), world=1, count=4)
        assert (faults.gets("text-000002.tar"), faults.gets(".index.json")) == (1, before)


def test_ranks_of_a_machine_look_once(stored: Path) -> None:
    with faulty_server(directory(stored.parent)) as (url, faults):
        for _ in range(3):
            as_new_process()
            parse_paths(f"{url}/books")
        assert faults.gets("dataset.json") == 1


def test_a_tar_that_is_missing_or_of_another_size_refuses_the_data_at_once(stored: Path) -> None:
    tar = stored / "shards" / "text-000002.tar"
    with tar.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(DataError, match=r"text-000002.tar: \d+ .*text-000002.index.json"):
        open_sources(config_for(f"file://{stored}"), rank=0, world=1)
    tar.unlink()
    look_again(local_directory(f"file://{stored}"))
    with pytest.raises(DataError, match=r"file://.*/books/shards/text-000002.tar"):
        open_sources(config_for(f"file://{stored}"), rank=0, world=1)


def test_names_that_lead_out_of_the_data_set(stored: Path) -> None:
    document = json.loads((stored / "dataset.json").read_text())
    (stored / "dataset.json").write_text(json.dumps({**document, "shards": ["../../a.tar"]}))
    with pytest.raises(DataError, match=r"'\.\./\.\./a\.tar'"):
        local_directory(f"file://{stored}")


@pytest.mark.parametrize("url", ["s3://", "file:///data/../x", "memory://"])
def test_urls_of_nothing(url: str) -> None:
    with pytest.raises(RefusedError, match=url):
        local_directory(url)


def test_a_url_without_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(DataError, match=r"other/dataset.json: .* 1 "):
        local_directory(f"file://{tmp_path}/other")


def test_local_data_imports_no_fsspec(stored: Path) -> None:
    """fsspec comes with torch's own imports or not at all: what reads local data does not ask for it."""
    code = (
        "import sys\n"
        "sys.modules['fsspec'] = None\n"
        "from pathlib import Path\n"
        "from trp_scale.data.mixture import parse_paths\n"
        "from trp_scale.data.text.dataset import open_text_dataset\n"
        "from trp_scale.data.tar_reader import ArrayReader\n"
        "data = open_text_dataset(parse_paths(sys.argv[1])[0].path)\n"
        "ArrayReader(data.samples, data.blocks, verify=True).arrays(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(stored)], check=True)
