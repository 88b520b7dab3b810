"""A data set in a bucket of a real S3 server on this machine, which fails on purpose now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty_server import Faults, faulty_server, server
from tests.unit.data.images import stored as images
from tests.unit.data.images.foreign_tars import index, three_tars
from tests.unit.data.loaded import assert_same, steps
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.mirror import local_directory
from trp_scale.data.tar_reader import SampleReader
from trp_scale.errors import DataError
from trp_scale.sharding.verify import verify_dataset
from trp_scale.storage.transfer import Remote, RemoteError

pytest.importorskip("s3fs", reason="no s3fs here (extra [remote])")
pytest.importorskip("moto", reason="no moto here (extra [test])")

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, Faults]]:
    """The URL of a server, and what goes wrong there."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    with faulty_server(server(*running.get_host_and_port())) as (url, faults):
        yield url, faults
    running.stop()


@pytest.fixture
def signed(s3: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch) -> Faults:
    """What a user sets for a server that is not Amazon's."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3[0]}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses take seconds
    s3[1].of.clear()
    s3[1].asked.clear()
    return s3[1]


def upload(directory: Path, bucket: str) -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    for path in directory.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), bucket, f"books/{path.relative_to(directory)}")


def test_rows_from_a_bucket_are_those_of_the_local_data_set(signed: Faults, tmp_path: Path) -> None:
    stored = write_dataset(tmp_path / "books", block_rows=[[5, 7], [6], [4, 3, 2], [8]])
    upload(stored, "first")
    signed.of = {
        "dataset.json": ["500"],
        "text-000001.index.json": ["cut"],
        "text-000001.tar": ["500", "close", "cut", "short"],
        "text-000002.tar": ["503"],
    }
    # No workers: the server that forks them may have started before these variables were set.
    ours = steps(config_for("s3://first/books", data={"workers": 0}), world=1, count=4)
    assert_same(ours, steps(config_for(stored), world=1, count=4))
    assert not any(signed.of.values()), "every failure was met"
    assert signed.gets("text-000003.tar") == 1


def test_tars_of_others_in_a_bucket_are_indexed_and_read_there(signed: Faults, tmp_path: Path, cache: Path) -> None:
    tars = three_tars(tmp_path / "far")
    upload(tmp_path / "far", "foreign")
    pattern = "s3://foreign/books/train-{000000..000002}.tar"
    signed.of = {"train-000001.tar": ["500", "cut", "close"]}
    index(pattern, tmp_path / "ours", "--rows_per_block", "4")
    index(tmp_path / "far", tmp_path / "near", "--rows_per_block", "4")
    assert not cache.exists() and not list((tmp_path / "ours").rglob("*.tar"))
    assert open_image_dataset(tmp_path / "ours").digest() == open_image_dataset(tmp_path / "near").digest()
    signed.of, signed.asked = {"train-000000.tar": ["500", "short"]}, []
    found = steps(images.config_for(tmp_path / "ours"), world=2, count=2)
    assert_same(found, steps(images.config_for(tmp_path / "near"), world=1, count=2))
    assert signed.gets("train-000002.tar") == 1, "from the cache from then on"
    assert verify_dataset(tmp_path / "ours").bytes == sum(tar.stat().st_size for tar in tars)
    folder = index("s3://foreign/books", tmp_path / "folder", "--rows_per_block", "4")
    assert open_image_dataset(folder).digest() == open_image_dataset(tmp_path / "near").digest()
    upload(tmp_path / "ours", "indexed")  # the indexed data set may be in a bucket itself
    assert_same(steps(images.config_for("s3://indexed/books", data={"workers": 0}), world=2, count=2), found)


def test_a_tar_in_a_bucket_that_has_changed_is_refused_when_it_is_fetched(signed: Faults, tmp_path: Path) -> None:
    three_tars(tmp_path / "far")
    upload(tmp_path / "far", "changing")
    data = index("s3://changing/books", tmp_path / "data")
    tar = tmp_path / "far" / "train-000002.tar"
    tar.write_bytes(tar.read_bytes().replace(b"a sight", b"a SIGHT"))
    upload(tmp_path / "far", "changing")
    reader = SampleReader(open_image_dataset(data).samples, verify=False)
    with pytest.raises(DataError, match=r"s3://changing/books/train-000002.tar"):
        reader.members(17)
    index(data)
    assert SampleReader(open_image_dataset(data).samples, verify=True).members(17)


def test_without_credentials_the_error_says_what_to_set(signed: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(RemoteError, match=r"s3://second/books: .*AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        local_directory("s3://second/books")


def test_a_wrong_key_is_refused_at_once(signed: Faults) -> None:
    signed.of = {"": ["403"] * 100}
    with pytest.raises(RemoteError, match="AWS_ACCESS_KEY_ID"):
        Remote("s3://third/books").list_files()
