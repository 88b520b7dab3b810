"""CPUs of a rank: those it is bound to, shared where ranks are bound to the same ones, within the quota."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trp_scale.distributed import environment
from trp_scale.distributed.environment import cpu_quota, cpus_of_rank
from trp_scale.distributed.groups import Group


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
