"""Loader workers that end, stand still, or are ended by what they read: the same rows come from new ones."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import environment
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.core.batch import Batch
from trp_scale.data import fetch
from trp_scale.data.fetch import Fetcher, MicroBatches, StoppedWaitingError
from trp_scale.data.plan import Addresses
from trp_scale.data.sources import TrainSource
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


class Positions:
    """The order of the numbers themselves."""

    rows = 100

    def locate(self, positions: Any) -> Addresses:
        present = np.ones(len(positions), dtype=np.bool_)
        return Addresses(
            member=0 * positions,
            block=positions // 10,
            row=positions % 10,
            epoch=positions,
            keys=positions,
            present=present,
        )


class Dangerous:
    """A builder of which some rows end the process that reads them, as a decoder's fault does."""

    def __init__(self, lethal: tuple[int, ...] = (), *, only: str = "") -> None:
        self.lethal, self.only = lethal, only

    def build(self, addresses: Addresses, start: int) -> Batch:
        for key, present in zip(addresses.keys.tolist(), addresses.present.tolist(), strict=True):
            if present and key in self.lethal:
                os.kill(os.getpid(), signal.SIGSEGV)
        weights = torch.from_numpy(addresses.present.astype(np.float32))
        return Batch(fields={"row_weights": weights}, keys=torch.from_numpy(addresses.keys), start=start)


def batches(builder: Any, count: int = 6, **settings: Any) -> MicroBatches:
    ranges = [range(4 * n, 4 * n + 4) for n in range(count)]
    return MicroBatches(Fetcher(Positions(), builder), ranges, workers=2, prefetch=1, pin_memory=False, **settings)


def test_rows_that_end_a_process_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    loader = batches(Dangerous((6, 7)), 4)
    with caplog.at_level(logging.WARNING):
        found = list(loader)
    loader.close()
    assert [batch.start for batch in found] == [0, 4, 8, 12]
    assert torch.cat([batch.keys for batch in found]).tolist() == list(range(16))
    weights = torch.cat([batch["row_weights"] for batch in found])
    assert torch.where(weights == 0)[0].tolist() == [6, 7]
    reasons = {key: reason for batch in found for key, reason in batch.reasons.items()}
    assert set(reasons) == {key for batch in found for key in batch.corrupt}
    assert list(reasons) == ["block 0 of data set 0, row 6", "block 0 of data set 0, row 7"]
    assert len(caplog.messages) >= 1


def test_what_ends_workers_and_no_process_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory lacks for all of them at once."""
    monkeypatch.setattr(fetch, "_survives", lambda *arguments: True)
    loader = batches(Dangerous((2,)))
    with pytest.raises(DataError):
        list(loader)
    loader.close()


@pytest.mark.exhaustive
def test_workers_that_cannot_start_are_refused(tmp_path: Path, text_dataset: Path) -> None:
    """A script without a guarded main."""
    script = tmp_path / "script.py"
    settings = {"data": {"path": str(text_dataset), "workers": 2}, "training": {"steps": 3}}
    call = f"trp_scale.pretrain('pos_bert_tiny', run_dir={str(tmp_path / 'run')!r}, **{settings!r})"
    script.write_text(f"import trp_scale\n{call}\n")
    process = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 1 and "RefusedError" in process.stderr.splitlines()[-1]
    assert "__main__" in process.stderr.splitlines()[-1]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", block_rows=[[5, 7, 3, 9]])


@pytest.fixture
def opened(dataset: Path) -> Iterator[Callable[..., TrainSource]]:
    made = []

    def make(workers: int, **reliability: Any) -> TrainSource:
        config = config_for(dataset, data={"workers": workers, "prefetch": 1}, reliability=reliability)
        made.append(open_sources(config, rank=0, world=1))
        return made[-1].train

    yield make
    for sources in made:
        sources.close()


def same(ours: list[Batch], theirs: list[Batch]) -> bool:
    return all(
        torch.equal(one.keys, other.keys) and all(torch.equal(one[name], other[name]) for name in other.fields)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_new_workers_make_the_same_rows(opened: Callable[..., TrainSource], number: signal.Signals) -> None:
    """After one was killed, and after one stood still for worker_seconds."""
    train, expected = opened(2, worker_seconds=5.0), opened(0)
    before = set(multiprocessing.active_children())
    assert same(train.next_window(), expected.next_window())
    workers = [child for child in multiprocessing.active_children() if child not in before]
    assert workers[0].pid is not None
    os.kill(workers[0].pid, number)
    for _ in range(8):
        assert same(train.next_window(), expected.next_window())
    assert not workers[0].is_alive()


def test_a_run_that_was_asked_to_stop_does_not_wait_for_rows(
    opened: Callable[..., TrainSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STOP_WAIT_SECONDS", 1.0)
    train, expected = opened(2), opened(0)
    asked = [False]
    train.stop_requested = lambda: asked[0]
    before = set(multiprocessing.active_children())
    assert same(train.next_window(), expected.next_window())
    workers = [child for child in multiprocessing.active_children() if child not in before]
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
    asked[0] = True
    began = time.monotonic()
    with pytest.raises(StoppedWaitingError):
        for _ in range(4):  # beyond what was fetched ahead
            cursor = train.cursor
            train.next_window()
            expected.next_window()
    assert time.monotonic() - began < 60
    assert train.cursor == cursor
    asked[0] = False
    train.seek(cursor)
    assert same(train.next_window(), expected.next_window()), "they can be asked for again"
