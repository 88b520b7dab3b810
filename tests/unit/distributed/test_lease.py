"""One run a directory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import environment
from trp_scale.distributed.lease import LEASE, Lease, lease_holder
from trp_scale.errors import RefusedError
from trp_scale.training.ending import STOP_RECORD, Ending


def quick(run_dir: Path, **settings: Any) -> Lease:
    return Lease(run_dir, gone_after=1.0, renewed_each=0.1, **settings)


def test_a_second_start_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    with quick(tmp_path):
        assert lease_holder(tmp_path)["process"] == os.getpid()
        with (
            pytest.raises(RefusedError, match=f"{os.getpid()}"),
            quick(tmp_path),
        ):
            pass
        assert lease_holder(tmp_path), "the first one has it still"
    assert not (tmp_path / LEASE).exists()
    with quick(tmp_path):
        assert not lease_holder(tmp_path)["gone"]


def test_it_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with quick(tmp_path), pytest.raises(RefusedError), quick(tmp_path):
        pass
    Ending(run_dir=tmp_path, rank=0).hung(3, "rank 1 did not answer")
    assert json.loads((tmp_path / STOP_RECORD).read_text())["step"] == 3


def test_a_removed_run_directory_ends_the_run(tmp_path: Path) -> None:
    run_dir, messages, ended = tmp_path / "run", list[str](), threading.Event()
    run_dir.mkdir()

    def end(message: str) -> None:
        messages.append(message)
        ended.set()

    with quick(run_dir, lost=end):
        shutil.rmtree(run_dir)
        assert ended.wait(10)
    assert str(run_dir) in messages[0]


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    code = (
        f"import os; from trp_scale.distributed.lease import *; Lease(Path({str(tmp_path)!r})).__enter__(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=False, timeout=60)
    assert lease_holder(tmp_path)["gone"]
    began = time.monotonic()
    with Lease(tmp_path):
        assert time.monotonic() - began < 5, "its host knows that it is gone: nobody waits for signs of life"
        assert lease_holder(tmp_path)["process"] == os.getpid()


def test_a_process_of_another_container_may_be_alive_though_it_is_not_seen(tmp_path: Path) -> None:
    """Two containers of a host may share its name."""
    with Lease(tmp_path):
        held = json.loads((tmp_path / LEASE).read_text())
    (tmp_path / LEASE).write_text(json.dumps({**held, "pid_namespace": "pid:[1]", "began": "another's"}))
    assert not lease_holder(tmp_path)["gone"]
    (tmp_path / LEASE).write_text(json.dumps({**held, "began": "another's"}))
    assert lease_holder(tmp_path)["gone"]


def of_another_host(run_dir: Path) -> None:
    (run_dir / LEASE).write_text(json.dumps({"token": "t", "host": "node7", "process": 12, "started": "today"}))


def test_another_hosts_lease_is_taken_over_when_it_is_not_renewed(tmp_path: Path) -> None:
    of_another_host(tmp_path)
    began = time.monotonic()
    with quick(tmp_path):
        assert time.monotonic() - began > 0.9
        assert lease_holder(tmp_path)["process"] == os.getpid()


def test_another_hosts_lease_that_is_renewed_is_refused(tmp_path: Path) -> None:
    of_another_host(tmp_path)
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.1):
            os.utime(tmp_path / LEASE)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(RefusedError, match="process 12 on node7, started today"), quick(tmp_path):
            pass
    finally:
        done.set()
        thread.join()


def test_who_was_taken_over_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    with quick(tmp_path, lost=told.append):
        of_another_host(tmp_path)
        until = time.monotonic() + 10
        while not told and time.monotonic() < until:
            time.sleep(0.05)
    assert "process 12 on node7 has taken over this directory" in told[0]
    assert lease_holder(tmp_path)["host"] == "node7", "and leaves the other one's lease"


def test_of_many_starts_at_once_one_gets_it(tmp_path: Path) -> None:
    """Also where each finds the lease of a process that is gone."""
    of_another_host(tmp_path)
    got: list[Lease] = []
    refused: list[str] = []

    def start() -> None:
        lease = quick(tmp_path)
        try:
            got.append(lease.__enter__())
        except RefusedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
    got[0].__exit__(None, None, None)


@pytest.mark.parametrize("content", ["", "[" * 100_000, "[]", '{"token": 3}'])
def test_a_damaged_lease_is_of_nobody_that_renews_it(tmp_path: Path, content: str) -> None:
    (tmp_path / LEASE).write_text(content)
    with quick(tmp_path):
        assert lease_holder(tmp_path)["process"] == os.getpid()
