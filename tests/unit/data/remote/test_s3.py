"""A data set in a bucket of a real S3 server on this machine, which fails on purpose now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty_server import Faults, faulty_server, server
from tests.unit.data.loaded import assert_same, steps
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.data.remote.mirror import local_directory
from trp_scale.data.remote.transfer import Remote, RemoteError

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


def test_without_credentials_the_error_says_what_to_set(signed: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(RemoteError, match=r"s3://second/books: no permission .*AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        local_directory("s3://second/books")


def test_a_wrong_key_is_refused_at_once(signed: Faults) -> None:
    signed.of = {"": ["403"] * 100}
    with pytest.raises(RemoteError, match=r"no permission .*AWS_ACCESS_KEY_ID"):
        Remote("s3://third/books").listed()
