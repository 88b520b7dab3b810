"""Tars of the next positions are there before they are read."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_server import directory, faulty_server
from tests.grids import always
from tests.unit.data.loaded import assert_same, steps, whole_member
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.data import prefetch as ahead
from trp_scale.data.mirror import local_directory
from trp_scale.data.plan import HeldOutPlan, TrainPlan
from trp_scale.data.prefetch import TarsAhead, tars_ahead
from trp_scale.data.text.dataset import TextDataset, open_text_dataset
from trp_scale.errors import RefusedError
from trp_scale.pretraining.base import open_sources
from trp_scale.storage.cache import CacheUse
from trp_scale.storage.transfer import RemoteError
from trp_scale.training.report import describe_cache

ROOT = Path(__file__).resolve().parents[4]
TARS = 12


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """12 tars of one block of 5 rows."""
    return write_dataset(tmp_path / "far" / "books", block_rows=[[5]] * TARS)


def opened(stored: Path) -> tuple[TextDataset, TrainPlan]:
    return opened_at(f"file://{stored}")


def opened_at(url: str) -> tuple[TextDataset, TrainPlan]:
    dataset = open_text_dataset(local_directory(url))
    return dataset, TrainPlan(seed=0, members=[whole_member(dataset.blocks)], blocks_per_group=2)


def until(there: Callable[[], bool]) -> None:
    """Wait for what another thread does; fails after a minute."""
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def held(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*.tar")}


def order(dataset: TextDataset, plan: TrainPlan, start: int, stop: int) -> list[str]:
    """Names of the tars of these positions, in the order in which they come."""
    blocks = plan.locate(np.arange(start, stop)).block.tolist()
    return list(dict.fromkeys(dataset.tars(block)[0][1].tar.name for block in blocks))


def test_the_next_tars_of_the_order_are_fetched(stored: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRP_SCALE_TARS_AHEAD", "3")
    dataset, plan = opened(stored)
    fetching = TarsAhead(plan, [dataset])
    monkeypatch.setattr(ahead, "_CHUNK", 16)
    try:
        fetching.reading(0)
        until(lambda: len(held(cache)) == 3)
        assert held(cache) == set(order(dataset, plan, 0, 60)[:3])
        fetching.reading(30)
        expected = set(order(dataset, plan, 0, 60)[:3]) | set(order(dataset, plan, 30, 90)[:3])
        until(lambda: held(cache) == expected)
    finally:
        fetching.close()


def test_no_more_than_half_of_the_cache(stored: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = max(path.stat().st_size for path in stored.rglob("*.tar"))
    monkeypatch.setenv("TRP_SCALE_CACHE_GB", str(8.1 * size / 1e9))
    monkeypatch.setenv("TRP_SCALE_CACHE_PARTS", "never")
    dataset, plan = opened(stored)
    fetching = TarsAhead(plan, [dataset])
    wanted = list(fetching._missing(0))
    assert [each.tar.name for _, each in wanted] == order(dataset, plan, 0, 60)[:4]
    fetching.close()


def test_a_pass_over_what_is_held_out_ends(stored: Path) -> None:
    dataset, _ = opened(stored)
    plan = HeldOutPlan(members=[replace(whole_member(dataset.blocks), chosen=np.arange(TARS) >= 9)])
    fetching = TarsAhead(plan, [dataset])
    assert [each.tar.name for _, each in fetching._missing(0)] == [f"text-{number:06d}.tar" for number in (9, 10, 11)]
    fetching.close()


@pytest.mark.parametrize("workers", always([0, 2], 0))
def test_rows_are_the_same_and_no_tar_is_fetched_twice(workers: int, stored: Path) -> None:
    expected = steps(config_for(stored), world=1, count=4)
    with faulty_server(directory(stored.parent)) as (url, faults):
        ours = steps(config_for(f"{url}/books", data={"workers": workers}), world=2, count=4)
        assert_same(ours, expected)
        assert all(faults.gets(f"text-{number:06d}.tar") <= 1 for number in range(TARS))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_cache_did_is_counted(workers: int, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trp_scale.storage.cache._shared", {})  # a fetch of a test before this one may still end
    sources = open_sources(config_for(f"file://{stored}", data={"workers": workers}), rank=0, world=1)
    sources.train.next_window()
    use = CacheUse(**sources.cache_use())
    for _ in range(6):
        sources.train.next_window()
    use = use.plus(CacheUse(**sources.cache_use()))
    assert use.found + use.fetched == TARS and use.fetched + use.ahead == TARS
    sizes = sum(path.stat().st_size for path in stored.rglob("*.tar"))
    assert use.fetched_bytes + use.ahead_bytes == sizes
    sources.close()
    assert f"of {TARS} tars " in (line := describe_cache(use._asdict())) and f"; {TARS} fetched, {use.ahead} " in line
    local = open_sources(config_for(stored, data={"workers": workers}), rank=0, world=1)
    local.train.next_window()
    if workers:  # in this process a cache has been used before
        assert local.cache_use() == {}
    local.close()


def test_an_error_is_met_by_who_reads_the_tar(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_server(directory(stored.parent)) as (url, faults):
        dataset, plan = opened_at(f"{url}/books")
        last = order(dataset, plan, 0, 60)[-1]
        faults.of[last] = ["500"] * 1000
        sources = open_sources(config_for(f"{url}/books"), rank=0, world=1)
        expected = open_sources(config_for(stored), rank=0, world=1)
        monkeypatch.setenv("TRP_SCALE_REMOTE_SECONDS", "3")
        read = 0
        with pytest.raises(RemoteError, match=rf"{last}: .* 3 s"):
            while True:
                ours, theirs = sources.train.next_window(), expected.train.next_window()
                assert all((a.keys == b.keys).all() for a, b in zip(ours, theirs, strict=True))
                read += 1
        assert read > 0
        sources.close()
        expected.close()


def test_one_process_of_a_machine_fetches_ahead(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, plan = opened(stored)
    for name, value in (("LOCAL_RANK", "1"), ("TRP_SCALE_TARS_AHEAD", "0")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert tars_ahead(plan, [dataset]) is None
    assert tars_ahead(plan, [open_text_dataset(stored)]) is None, "a local data set"
    found = tars_ahead(plan, [dataset])
    assert found is not None
    found.close()
    monkeypatch.setenv("TRP_SCALE_TARS_AHEAD", "many")
    with pytest.raises(RefusedError, match="TRP_SCALE_TARS_AHEAD: 'many'"):
        tars_ahead(plan, [dataset])


RUN = """
import sys, time
from tests.unit.data.stored import config_for
from trp_scale.pretraining.base import open_sources
from trp_scale.data import prefetch as ahead

sources = open_sources(config_for(sys.argv[1]), rank=0, world=1)
sources.train.next_window()
print("read", flush=True)
sys.stdin.readline()
sources.close()
"""


@pytest.mark.exhaustive
def test_a_fetch_under_way_does_not_hold_up_the_end(stored: Path, cache: Path) -> None:
    """The server answers for the tars of the first window, and never for the last of the order."""
    with faulty_server(directory(stored.parent)) as (url, faults):
        dataset, plan = opened(stored)
        last = order(dataset, plan, 0, 60)[-1]
        waiting, end = threading.Event(), threading.Event()
        real = faults.next

        def hold(path: str) -> str:
            if path.endswith(last):
                waiting.set()
                end.wait(120)
            return real(path)

        faults.next = hold  # type: ignore[method-assign]
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, f"{url}/books"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"read\n"
        assert waiting.wait(60), "it was asked for ahead"
        process.communicate(b"\n", timeout=40)  # a request is given up after 60 s
        assert process.returncode == 0 and not end.is_set()
        end.set()
