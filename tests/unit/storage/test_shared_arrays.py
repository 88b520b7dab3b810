"""Arrays in common: one process of a machine computes, all see the same, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trp_scale.data.hashing import name_hash
from trp_scale.data.plan import Order
from trp_scale.errors import RefusedError
from trp_scale.storage import files as node_arrays
from trp_scale.storage.files import SHARED_FROM, NodeArray, content_key, node_array


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def files(store: Path) -> list[Path]:
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
    assert array.values.tolist() == many().tolist() and len(array) == 10 and not files(store)
    assert pickle.loads(pickle.dumps(array)).values.tolist() == many().tolist()


def test_long_ones_are_computed_once_and_pickle_as_their_path(store: Path) -> None:
    calls: list[str] = []
    one, other = shared("a", calls), shared("a", calls)
    assert calls == ["a"] and len(files(store)) == 1
    again = pickle.loads(pickle.dumps(one))
    assert one.values.tolist() == other.values.tolist() == again.values.tolist() == many().tolist()
    assert len(pickle.dumps(NodeArray(path=files(store)[0]))) < 400
    with pytest.raises(ValueError, match="read-only"):
        one.values[0] = 1


def test_files_that_nobody_uses_go_when_another_is_made(store: Path) -> None:
    kept = shared("kept")
    shared("left")  # is dropped at once
    assert len(files(store)) == 2
    last = shared("last")
    assert [path.stem for path in files(store)] == ["kept", "last"]
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
    assert [path.stem for path in files(store)] == ["one", "other"]
    for process in processes:
        process.kill()
        process.join()
    shared("third")
    assert [path.stem for path in files(store)] == ["third"]


def _hold(answers: multiprocessing.Queue, holds: multiprocessing.Queue, store: str, number: int) -> None:
    tempfile.tempdir = store
    array = node_array(SHARED_FROM, lambda: "one", lambda: many(1000 * number))
    answers.put(int(array.values[0]))
    holds.get()


def test_a_directory_of_someone_else_is_refused(store: Path) -> None:
    shared("a")
    files(store)[0].parent.chmod(0o777)
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
    assert not files(store)
    monkeypatch.setattr(node_arrays, "SHARED_FROM", 10)
    assert located() == plain and files(store)
