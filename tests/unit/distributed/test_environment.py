"""CPUs of a rank: those it is bound to, shared where ranks are bound to the same ones, within the quota."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import free_port
from trp_scale.config import RefusedError
from trp_scale.distributed import environment
from trp_scale.distributed import environment as gathering
from trp_scale.distributed.environment import cpu_quota, cpus_of_rank, gather
from trp_scale.distributed.groups import Group
from trp_scale.distributed.launchers import RankInfo


class Ranks(Group):
    """Seen from the first of several ranks, each with its host and CPUs."""

    def __init__(self, *places: tuple[str, set[int]]) -> None:
        object.__setattr__(self, "places", places)

    def gather_objects(self, value: Any) -> list[Any]:
        assert value == self.places[0]  # type: ignore[attr-defined]
        return list(self.places)  # type: ignore[attr-defined]


ALL = set(range(8))


@pytest.mark.parametrize(
    ("places", "quota", "expected"),
    [
        ([("a", ALL)], None, 8),
        ([("a", ALL)] * 2 + [("b", ALL)] * 2, None, 4),  # another node's ranks take nothing
        ([("a", {0, 1, 2, 3}), ("a", {4, 5, 6, 7})], None, 4),  # bound by srun: not divided once more
        ([("a", {0, 1, 2, 3}), ("a", {2, 3, 4, 5})], None, 3),
        ([("a", {0, 1, 2})] * 3, None, 1),
        ([("a", {0})] * 3, None, 1),
        ([("a", ALL)], 2.5, 2),
        ([("a", ALL)] * 2, 6.0, 3),
        ([("a", ALL)], 0.5, 1),
    ],
)
def test_each_rank_has_its_share(
    places: list[tuple[str, set[int]]], quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.socket, "gethostname", lambda: places[0][0])
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda process: places[0][1])
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    assert cpus_of_rank(Ranks(*places)) == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, None),
        ({"job": "max 100000", "job/step": "max 100000"}, None),
        ({"job": "400000 100000", "job/step": "max 100000"}, 4.0),
        ({"job": "400000 100000", "job/step": "150000 100000"}, 1.5),
        ({"": "300000 100000", "job": "400000 100000"}, 3.0),
        ({"other": "100000 100000"}, None),
    ],
)
def test_the_smallest_quota_of_a_group_and_those_above_it_counts(
    groups: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    for name, limit in groups.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cpu.max").write_text(limit + "\n")
    own.write_text("3:cpuset:/\n0::/job/step\n")
    assert cpu_quota(own, root) == expected
    assert cpu_quota(tmp_path / "missing", root) is None  # not Linux, or version 1


Start = Callable[..., "Future[dist.Store]"]
LONG, SHORT = timedelta(seconds=30), timedelta(seconds=2)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Begins a rank in a thread; all at one port, with a word after 0.2 s unless told otherwise."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(gathering, "_SLICE", timedelta(seconds=0.1))
    port, pool = free_port(), ThreadPoolExecutor(4)

    def begin(rank: int, world: int, timeout: timedelta = LONG, report: float = 0.2) -> Future[dist.Store]:
        info = RankInfo(rank=rank, world=world, master_port=port)
        return pool.submit(gather, info, timeout=timeout, first_report=report)

    return begin


def test_ranks_that_are_all_there_share_a_store_and_say_nothing(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    stores = [started.result() for started in [start(rank, 3, report=20) for rank in (2, 0, 1)]]
    stores[1].set("told", "by rank 0")
    assert [store.get("told") for store in stores] == [b"by rank 0"] * 3
    assert [store.timeout for store in stores] == [LONG] * 3
    assert "not connected" not in capfd.readouterr().err


def test_missing_ranks_are_named_while_they_are_awaited_and_when_it_is_over(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    began = [start(rank, 6, SHORT, report=1.0) for rank in (0, 3)]
    for started in began:
        with pytest.raises(RefusedError, match=r"1-2.*4-5.*of 6.*127\.0\.0\.1:\d+.*\d"):
            started.result()
    said = [line for line in capfd.readouterr().err.splitlines() if line.endswith(": waiting")]
    assert said
    assert all(line.startswith(f"[rank 0 on {socket.gethostname()}] ranks 1-2, 4-5 of 6") for line in said), said


def test_a_late_rank_is_awaited(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    first = start(0, 2)
    while "rank 1 of 2 has not connected" not in (said := capfd.readouterr().err):
        assert not first.done(), said
    start(1, 2).result()
    first.result()


def test_rank_0_is_named_where_nobody_listens(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RefusedError, match=r"rank 0 of 2 has not connected to .* after \d s \(Connection refused\)"):
        start(1, 2, SHORT).result()
    assert "rank 0 of 2 has not connected" in capfd.readouterr().err


def test_a_host_that_nobody_knows_is_named() -> None:
    info = RankInfo(rank=1, world=2, master_addr="no.such.host.invalid", master_port=1)
    with pytest.raises(
        RefusedError, match=r"rank 0 of 2 has not connected to no\.such\.host\.invalid:1 after .* \(.*not known"
    ):
        gather(info, timeout=timedelta(seconds=0.1))


def test_another_world_at_the_same_port_is_refused(start: Start) -> None:
    stores = [started.result() for started in [start(0, 2), start(1, 2)]]
    assert stores
    with pytest.raises(RefusedError, match=r"rank 3.*of 4.*of 2"):
        start(3, 4).result()


def test_a_rank_that_is_there_twice_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [started.result() for started in [start(0, 2), start(1, 2)]]
    assert stores
    monkeypatch.setattr(gathering.os, "getpid", lambda: 7)
    with pytest.raises(RefusedError, match=r"rank 1.*of 2.*process 7"):
        start(1, 2).result()


def test_a_port_that_is_taken_is_refused(start: Start) -> None:
    stores = [started.result() for started in [start(0, 2), start(1, 2)]]
    assert stores
    with pytest.raises(RefusedError, match=r"port .* is in use"):
        start(0, 2).result()


def test_ranks_share_gpus_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.torch.cuda, "device_count", lambda: 1)
    second = RankInfo(rank=1, world=2, local_rank=1, local_world=2, launcher="torchrun")
    with pytest.raises(RefusedError, match="2 processes"):
        environment._device(second)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert environment._device(second).index == 0
