"""Files under URLs arrive whole, whatever the server does meanwhile; or an error says what to change."""

from __future__ import annotations

import base64
import gzip
import os
import random
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faulty_server import Answer, directory, faulty_server
from trp_scale.config.schema import CREDENTIALS, clean_text
from trp_scale.distributed import stop
from trp_scale.errors import DataError, RefusedError
from trp_scale.storage import transfer
from trp_scale.storage.transfer import Remote, RemoteError, RemoteSetupError, is_url

CONTENT = bytes(range(256)) * 40  # 10,240 bytes


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 1,000 bytes."""
    monkeypatch.setattr(transfer, "PIECE", 1000)


def written(remote: Remote, name: str, path: Path, size: int, start: int = 0) -> bytes:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        remote.read_into(descriptor, name, size, start)
        return path.read_bytes()
    finally:
        os.close(descriptor)


def test_a_drive_or_a_name_with_a_colon_is_no_url() -> None:
    assert is_url("s3://bucket/data") and is_url("file:///data")
    assert not is_url("/data/books") and not is_url("books:0.7=/a") and not is_url("a:b")


@pytest.mark.parametrize("fault", ["500", "503", "cut", "short", "close"])
def test_what_fails_is_asked_for_again(fault: str, tmp_path: Path, small_pieces: None) -> None:
    (tmp_path / "tar").write_bytes(CONTENT)
    with faulty_server(directory(tmp_path)) as (url, faults):
        faults.of["tar"] = [fault] * 3
        assert written(Remote(url), "tar", tmp_path / "copy", len(CONTENT)) == CONTENT
        assert faults.gets("tar") == 11 + 3
        assert written(Remote(url), "tar", tmp_path / "part", 2500, start=300) == CONTENT[300:2800]


def test_a_request_that_stalls_ends_and_is_asked_again(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "REQUEST_SECONDS", 0.3)
    (tmp_path / "tar").write_bytes(CONTENT)
    with faulty_server(directory(tmp_path)) as (url, faults):
        faults.of["tar"] = ["stall", "", "stall"]
        began = time.monotonic()
        assert written(Remote(url), "tar", tmp_path / "copy", len(CONTENT)) == CONTENT
        assert time.monotonic() - began < 20


def test_a_library_that_does_not_come_back_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """File systems that are not asynchronous have no way to end a request."""
    (tmp_path / "file").write_bytes(CONTENT)
    remote = Remote(f"file://{tmp_path}")
    monkeypatch.setattr(transfer, "REQUEST_SECONDS", 0.2)
    read, stalls = remote._files.cat_file, iter([30.0])
    monkeypatch.setattr(
        remote._files, "cat_file", lambda *given, **named: (time.sleep(next(stalls, 0)), read(*given))[1]
    )
    assert remote.read("file") == CONTENT


def test_an_end_to_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRP_SCALE_REMOTE_SECONDS", "2")
    (tmp_path / "tar").write_bytes(CONTENT)
    with faulty_server(directory(tmp_path)) as (url, faults):
        faults.of["tar"] = ["503"] * 1000
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"(?s)/tar: .* 2 s, .*\d+ requests, .*503.*TRP_SCALE_REMOTE_SECONDS"):
            Remote(url).read("tar")
        assert time.monotonic() - began < 15
    with pytest.raises(RemoteError, match=r" 2 s"):
        Remote(url).read("tar")  # nobody listens there now


def test_a_signal_to_stop_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's request, and a pause that is longer than what is left."""
    monkeypatch.setattr(transfer, "SECONDS_TO_STOP", 0.5)
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 15.0)
    asked = threading.Timer(2.0, lambda: stop.record_early_signal(signal.SIGTERM))
    (tmp_path / "tar").write_bytes(CONTENT)
    with faulty_server(directory(tmp_path)) as (url, faults):
        faults.of["tar"] = ["503"] * 1000
        began = time.monotonic()
        asked.start()
        with pytest.raises(RemoteError, match=r" stop, .*2 requests"):
            Remote(url).read("tar")
        assert time.monotonic() - began < 14


def test_a_server_that_does_not_answer_is_told_long_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)
    (tmp_path / "tar").write_bytes(CONTENT)
    with faulty_server(directory(tmp_path)) as (url, faults):
        for failures, told in ((5, 0), (20, 1)):
            faults.of["tar"] = ["503"] * failures
            caplog.clear()
            assert Remote(url).read("tar") == CONTENT
            assert sum("the request is repeated for " in line for line in caplog.messages) == told


def test_a_file_that_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    with faulty_server(directory(tmp_path)) as (url, faults):
        with pytest.raises(DataError, match="/none"):
            Remote(url).read("none")
        assert faults.gets("none") == 1


@pytest.mark.parametrize("status", ["401", "403"])
def test_no_permission_is_asked_for_once_and_says_what_to_set(status: str, tmp_path: Path) -> None:
    with faulty_server(directory(tmp_path)) as (url, faults):
        faults.of["tar"] = [status] * 5
        with pytest.raises(RemoteError, match="FSSPEC_HTTPS"):
            Remote(url).read("tar")
        assert faults.gets("tar") == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_body_that_does_not_end_is_not_taken(packed: bool) -> None:
    """14 MB of gzip took 4 GB, and a body without an end what there was."""
    content = bytes(64 << 20)
    if packed:  # such pieces as arrive together unpack to some MB
        content = gzip.compress(random.Random(1).randbytes(1 << 20) * 64, compresslevel=1)
    answer = Answer(200, {"Content-Encoding": "gzip"} if packed else {}, content)
    with faulty_server(lambda *_: answer) as (url, _):
        remote = Remote(url).once()
        for read in (
            lambda: remote.read("dataset.json", 1000),
            lambda: remote.read_range("x.tar", 5000, 6000, 1 << 40),
            lambda: remote.read_range("x.tar", 0, 500, 1000),
        ):
            tracemalloc.start()
            try:
                with pytest.raises(RemoteError, match="1000 bytes"):
                    read()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 16 << 20


def test_a_server_that_sends_whole_files_only(tmp_path: Path, small_pieces: None) -> None:
    (tmp_path / "tar").write_bytes(CONTENT)
    with faulty_server(directory(tmp_path, ranges=False)) as (url, faults):
        assert written(Remote(url), "tar", tmp_path / "copy", len(CONTENT)) == CONTENT
        assert faults.gets("tar") == 1


def test_listed_files_have_sizes_and_versions(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.tar").write_bytes(CONTENT)
    listed = Remote(f"file://{tmp_path}").list_files()
    assert listed is not None and list(listed) == ["shards/a.tar"] and listed["shards/a.tar"].size == len(CONTENT)
    before = listed["shards/a.tar"].version
    os.utime(tmp_path / "shards" / "a.tar", (1, 1))
    again = Remote(f"file://{tmp_path}").list_files()
    assert before and again is not None and again["shards/a.tar"].version != before


@pytest.mark.parametrize(
    ("url", "said"),
    [("nothing://a/b", "nothing.*s3://"), ("s3://bucket/data?versionId=3", "query"), ("gs://bucket/data", "gcsfs")],
)
def test_urls_that_cannot_be_read(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # not installed
    with pytest.raises(RefusedError, match=said):
        Remote(url)


def test_seconds_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("long", "0", "nan"):
        monkeypatch.setenv("TRP_SCALE_REMOTE_SECONDS", wrong)
        with pytest.raises(RefusedError, match=f"TRP_SCALE_REMOTE_SECONDS: '{wrong}'"):
            Remote("file:///tmp")


def test_credentials_go_with_requests_and_into_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CREDENTIALS, "{}")
    (tmp_path / "file").write_bytes(b"content")
    serve = directory(tmp_path)

    def protected(method: str, path: str, headers: Mapping[str, str], content: bytes) -> Answer:
        expected = "Basic " + base64.b64encode(b"alice:p@ss").decode()
        return (
            serve(method, path, headers, content) if headers.get("Authorization") == expected else Answer(401, {}, b"")
        )

    with faulty_server(protected) as (url, _):
        assert Remote(clean_text(url.replace("://", "://alice:p%40ss@"))).read("file") == b"content"
        with pytest.raises(RemoteSetupError) as caught:
            Remote(clean_text(url.replace("://", "://alice:wrong@"))).read("file")
        assert "wrong" not in str(caught.value)
