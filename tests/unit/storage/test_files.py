"""What is written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trp_scale.data.index import write_json
from trp_scale.data.text.tokenizer import save_trained, train_word_piece
from trp_scale.errors import DataError
from trp_scale.sharding.parts import new_tar
from trp_scale.storage.files import only_run, remove_leftovers, temporary_beside, write_text


def test_a_disk_without_room_leaves_the_file_as_it_was_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "page.html", "before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as raised:
        write_text(tmp_path / "page.html", "after")
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"


def test_names_differ_where_host_and_process_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers: one host name, one process number."""
    monkeypatch.setattr("socket.gethostname", lambda: "node 7/of.many")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    names = {temporary_beside(tmp_path / "image-000000.tar").name for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(".image-000000.tar.node-7-of-many-1-") and name.endswith(".tmp") for name in names)


def test_two_writers_of_one_shard_leave_one_whole_shard(tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    shard, report = tmp_path / "text-000000.tar", tmp_path / "progress" / "text-000000.json"
    with new_tar(shard, report) as first, new_tar(shard, report) as second:
        for number in range(3):
            for opened in (first, second):
                opened.add(f"key-{number}", 1, {"txt": b"content"})
    whole = shard.read_bytes()
    with new_tar(shard, report) as alone:
        for number in range(3):
            alone.add(f"key-{number}", 1, {"txt": b"content"})
    assert shard.read_bytes() == whole
    assert not list(tmp_path.rglob("*.tmp"))


def test_writers_of_one_json_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"

    def write(number: int) -> None:
        for _ in range(50):
            write_json(path, {"number": number, "filling": "x" * 10_000 * number})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert json.loads(path.read_text())["number"] in range(4)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_tokenizer_that_is_there_already_stays(tmp_path: Path) -> None:
    tokenizer = train_word_piece(lambda: iter(["the cat sat on the mat"] * 9), 100, lowercase=True)
    directory = tmp_path / "tokenizer"
    save_trained(tokenizer, directory, lowercase=True, length=32)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    save_trained(tokenizer, directory, lowercase=True, length=32)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_leftovers_are_files_and_directories(tmp_path: Path) -> None:
    temporary_beside(tmp_path / "shard.tar").write_bytes(b"half")
    temporary_beside(tmp_path / "tokenizer").mkdir()
    (tmp_path / "kept.tmp").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.tmp"]


ROOT = Path(__file__).resolve().parents[3]


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with only_run(tmp_path), pytest.raises(DataError, match=f"process {os.getpid()} on "), only_run(tmp_path):
        pass
    with pytest.raises(KeyError), only_run(tmp_path):
        raise KeyError
    with only_run(tmp_path):
        pass
    assert list((tmp_path / "progress").iterdir()) == []


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from trp_scale.storage.files import only_run\n"
    program += "with only_run(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        with pytest.raises(DataError, match=f"process {holder.pid} on "), only_run(tmp_path):
            pass
        holder.kill()
    assert (tmp_path / "progress" / "lock").exists()
    with only_run(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "progress" / "lock").read_text()


def test_a_lock_whose_file_was_taken_away_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends, and takes the file away, between this run's opening of it and its lock."""
    taken, path = fcntl.flock, tmp_path / "progress" / "lock"

    def ends_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", taken)
        taken(descriptor, operation)
        path.unlink()

    monkeypatch.setattr("fcntl.flock", ends_first)
    with only_run(tmp_path), pytest.raises(DataError, match="another run"), only_run(tmp_path):
        pass
