"""What is written whole or not at all. Arrays in common: one process of a machine computes, all see the same, and
nothing stays behind."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from trp_scale.data.hashing import name_hash
from trp_scale.data.index import write_json
from trp_scale.data.plan import Order
from trp_scale.data.text.tokenizer import save_trained, train_word_piece
from trp_scale.errors import DataError, RefusedError
from trp_scale.sharding.parts import new_tar
from trp_scale.storage import files as node_arrays
from trp_scale.storage.files import (
    SHARED_FROM,
    NodeArray,
    content_key,
    node_array,
    only_run,
    remove_leftovers,
    temporary_beside,
    write_text,
)


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


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def arrays(store: Path) -> list[Path]:
    return sorted(store.glob("trp_scale-*/*.npy"))


def many(first: int = 0) -> np.ndarray:
    return np.arange(first, first + 10)


def shared(name: str, calls: list[str] | None = None, first: int = 0) -> NodeArray:
    def make() -> np.ndarray:
        if calls is not None:
            calls.append(name)
        return many(first)

    return node_array(SHARED_FROM, lambda: name, make)


def test_short_ones_stay_in_the_process(store: Path) -> None:
    array = node_array(SHARED_FROM - 1, lambda: pytest.fail("no name is needed"), many)
    assert array.values.tolist() == many().tolist() and len(array) == 10 and not arrays(store)
    assert pickle.loads(pickle.dumps(array)).values.tolist() == many().tolist()


def test_long_ones_are_computed_once_and_pickle_as_their_path(store: Path) -> None:
    calls: list[str] = []
    one, other = shared("a", calls), shared("a", calls)
    assert calls == ["a"] and len(arrays(store)) == 1
    again = pickle.loads(pickle.dumps(one))
    assert one.values.tolist() == other.values.tolist() == again.values.tolist() == many().tolist()
    assert len(pickle.dumps(NodeArray(path=arrays(store)[0]))) < 400
    with pytest.raises(ValueError, match="read-only"):
        one.values[0] = 1


def test_files_that_nobody_uses_go_when_another_is_made(store: Path) -> None:
    kept = shared("kept")
    shared("left")  # is dropped at once
    assert len(arrays(store)) == 2
    last = shared("last")
    assert [path.stem for path in arrays(store)] == ["kept", "last"]
    assert kept.values.tolist() == last.values.tolist()


def test_processes_agree_and_a_killed_one_leaves_no_lock(store: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue = context.Queue()
    holds: multiprocessing.Queue = context.Queue()
    processes = [context.Process(target=_hold, args=(answers, holds, str(store), n)) for n in (1, 2)]
    for process in processes:
        process.start()
    firsts = [answers.get(timeout=60) for _ in processes]
    assert firsts[0] == firsts[1] and firsts[0] in (1000, 2000)  # only one of them computed
    shared("other")
    assert [path.stem for path in arrays(store)] == ["one", "other"]
    for process in processes:
        process.kill()
        process.join()
    shared("third")
    assert [path.stem for path in arrays(store)] == ["third"]


def _hold(answers: multiprocessing.Queue, holds: multiprocessing.Queue, store: str, number: int) -> None:
    tempfile.tempdir = store
    array = node_array(SHARED_FROM, lambda: "one", lambda: many(1000 * number))
    answers.put(int(array.values[0]))
    holds.get()


def test_a_directory_of_someone_else_is_refused(store: Path) -> None:
    shared("a")
    arrays(store)[0].parent.chmod(0o777)
    with pytest.raises(RefusedError, match="TMPDIR"):
        shared("a")


def test_names_tell_contents_apart() -> None:
    keys = [
        content_key(1, "a"),
        content_key(1, "b"),
        content_key("1a"),
        content_key(many(), "a"),
        content_key(many(1), "a"),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key(many(), 1) == content_key(many().copy(), 1)


def test_the_order_is_the_same_from_files(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = np.array([name_hash(f"block {number}") for number in range(50)], dtype=np.uint64)
    rows = np.arange(1, 51)
    positions = np.random.default_rng(0).permutation(4000)

    def located() -> list[list[int]]:
        order = Order(seed=3, name="x", identities=identities, rows=rows, blocks_per_group=4)
        return [part.tolist() for part in order.locate(positions)]

    plain = located()
    assert not arrays(store)
    monkeypatch.setattr(node_arrays, "SHARED_FROM", 10)
    assert located() == plain and arrays(store)
