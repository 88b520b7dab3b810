"""What `trp-scale doctor` finds over ranks, two of which pass for two hosts."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks
from trp_scale.diagnostics import machine as doctor
from trp_scale.diagnostics.machine import Finding
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.distributed.launchers import RankInfo


def world() -> Group:
    return Group("world", dist.get_rank(), dist.get_world_size())


def of_two() -> Environment:
    return Environment(RankInfo(rank=dist.get_rank(), world=2, local_world=2), use_gpu=False)


def versions() -> list[Finding]:
    with mock.patch.object(doctor.platform, "python_version", lambda: f"3.{10 + dist.get_rank()}.1"):
        return [*doctor._check_versions(world())]


def network() -> list[Finding]:
    host = f"host{dist.get_rank()}"
    with (
        mock.patch.object(doctor.socket, "gethostname", lambda: host),
        mock.patch.object(doctor.socket, "gethostbyname", lambda name: f"127.0.1.{dist.get_rank() + 1}"),
    ):
        return [doctor._check_network(world())]


def compute(slow: int) -> list[Finding]:
    work = (dist.get_rank() == slow) * 9 + 1.0
    with mock.patch.object(doctor, "_measure", lambda *_: work):
        return [doctor._check_compute(of_two())]


def reduce(damaged: bool) -> list[Finding]:
    right = dist.all_reduce

    def wrong(numbers: torch.Tensor, group: object) -> None:
        right(numbers)
        numbers[-1] += damaged and dist.get_rank() == 1

    with mock.patch.object(doctor.dist, "all_reduce", wrong):
        return [doctor._check_all_reduce(of_two(), 1)]


def collectives(damaged: str) -> list[Finding]:
    right = getattr(dist, damaged)

    def wrong(numbers: torch.Tensor, *arguments: object, **named: object) -> None:
        right(numbers, *arguments, **named)
        numbers[-1] += dist.get_rank() == 1 and numbers.dtype == torch.bfloat16

    with mock.patch.object(doctor.dist, damaged, wrong):
        return [doctor._check_collectives(of_two(), 16)]


def storage(folders: list[str]) -> list[Finding]:
    return [doctor._check_storage(world(), Path(folders[dist.get_rank()]), 1)]


def examined() -> list[Finding]:
    place = RankInfo(rank=dist.get_rank(), world=2, local_rank=0, local_world=1, launcher="variables")
    with (
        mock.patch.object(doctor.socket, "gethostname", lambda: f"host{dist.get_rank()}"),
        mock.patch.object(doctor, "MIN_OPEN_FILES", 1 + dist.get_rank() * 10**12),
        Environment(place, use_gpu=False) as environment,
    ):
        return doctor.examine(environment, mebibytes=1)


def test_other_versions_are_wrong(two_ranks: Ranks) -> None:
    for (found,) in two_ranks(versions):
        assert found.state == "wrong" and "3.10.1 on rank 0; 3.11.1 on rank 1" in found.result


def test_a_name_that_is_the_hosts_own_loopback_is_wrong_between_hosts(two_ranks: Ranks) -> None:
    for rank, (found,) in enumerate(two_ranks(network)):
        assert found.state == "wrong" and f"host{rank} is 127.0.1.{rank + 1}" in found.result
        assert "GLOO_SOCKET_IFNAME" in found.change


def test_a_slow_rank_is_named(two_ranks: Ranks) -> None:
    for (found,) in two_ranks(compute, 1):
        assert found.state == "warning" and found.result.endswith("rank 1")
    for (found,) in two_ranks(compute, -1):
        assert found.state == "ok"


def test_sums_that_are_not_right_are_wrong_on_all_ranks(two_ranks: Ranks) -> None:
    for (found,) in two_ranks(reduce, True):
        assert found.state == "wrong"
    for (found,) in two_ranks(reduce, False):
        assert found.state == "ok" and "gloo" in found.result and "2 ranks" in found.result and "1 MiB" in found.result


def test_collectives_are_exact(two_ranks: Ranks) -> None:
    for (found,) in two_ranks(collectives, "barrier"):
        assert found.state == "ok" and "all_gather" in found.result


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_a_collective_with_a_wrong_number_is_named_on_all_ranks(two_ranks: Ranks, name: str) -> None:
    for (found,) in two_ranks(collectives, name):
        assert found.state == "wrong"
        assert found.result == f"wrong: {name.removesuffix('_tensor').removesuffix('_into')} of torch.bfloat16"


def test_storage_that_is_not_shared_is_wrong_and_nothing_stays(two_ranks: Ranks, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    for (found,) in two_ranks(storage, [str(folder) for folder in folders]):
        assert found.state == "wrong" and "(ranks 0-1)" in found.result
    for (found,) in two_ranks(storage, [str(tmp_path)] * 2):
        assert found.state in ("ok", "warning")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_what_one_host_alone_has_is_told_with_its_name(two_ranks: Ranks) -> None:
    for findings in two_ranks(examined):
        limits = {each.state: each.where for each in findings if each.check == "limits"}
        assert limits == {"ok": ("host0",), "warning": ("host1",)}
        (memory,) = [each for each in findings if each.check == "shared memory"]
        assert memory.where == ("host0", "host1")
