"""The one global order: golden values, every row once an epoch, purity. Splits: by block, disjoint, stable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.data.loaded import assert_same, joined, steps, whole_member
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.plan import ByBlock, Order, TrainPlan, downstream_validation, held_out, row_identities
from trp_scale.data.prefetch import Share
from trp_scale.distributed.launchers import NodeRanks, ranks_of_node
from trp_scale.pretraining.base import open_sources

GOLDEN_FIRST = [(5, 0), (4, 4), (5, 1), (0, 2), (4, 3), (4, 2), (0, 1), (0, 0), (4, 1), (4, 0), (6, 4), (6, 3)]

GOLDEN_FAR = [(6, 0), (6, 1)]

ROWS = np.array([3, 1, 4, 2, 5, 2, 6], dtype=np.int64)
IDENTITIES = np.array([name_hash(f"block {number}") for number in range(7)], dtype=np.uint64)


def order(seed: int = 0, name: str = "", blocks_per_group: int = 3) -> Order:
    return Order(seed=seed, name=name, identities=IDENTITIES, rows=ROWS, blocks_per_group=blocks_per_group)


def pairs(source: Order, positions: Integers) -> list[tuple[int, int]]:
    located = source.locate(positions)
    return list(zip(located.block.tolist(), located.row.tolist(), strict=True))


EVERY = [(block, row) for block, rows in enumerate(ROWS.tolist()) for row in range(rows)]


def test_golden_order() -> None:
    """A change of these numbers breaks every resume and every comparison between runs: it needs a new format."""
    assert pairs(order(), np.arange(12)) == GOLDEN_FIRST
    assert pairs(order(seed=7), np.array([1000, 1_000_000_007])) == GOLDEN_FAR


def test_every_row_once_an_epoch() -> None:
    source = order()
    assert source.rows == 23
    for epoch in range(4):
        positions = np.arange(23 * epoch, 23 * (epoch + 1))
        assert sorted(pairs(source, positions)) == EVERY
        assert source.locate(positions).epoch.tolist() == [epoch] * 23


def test_any_slice_in_any_order_gives_the_same() -> None:
    whole = pairs(order(), np.arange(200))
    shuffled = np.random.default_rng(0).permutation(200)
    source = order()
    for chunk in np.array_split(shuffled, 29):  # spans epochs and groups, forwards and backwards
        assert pairs(source, chunk) == [whole[position] for position in chunk]


def test_epochs_seeds_and_sources_differ() -> None:
    first = pairs(order(), np.arange(23))
    assert first != pairs(order(), np.arange(23, 46))
    assert first != pairs(order(seed=1), np.arange(23))
    assert first != pairs(order(name="wiki"), np.arange(23))


def test_rows_stay_within_their_group_of_blocks() -> None:
    located = order(blocks_per_group=2).locate(np.arange(23))
    groups = []
    position = 0
    while position < 23:
        blocks = set(located.block[position:].tolist()[:1])
        end = position
        while end < 23 and len(blocks | {int(located.block[end])}) <= 2:
            blocks.add(int(located.block[end]))
            end += 1
        groups.append(blocks)
        assert sum(int(ROWS[block]) for block in blocks) == end - position
        position = end
    assert len(groups) == 4
    assert sorted(block for group in groups for block in group) == list(range(7))


def test_row_identities_fit_into_int64() -> None:
    top = np.array([2**64 - 1], dtype=np.uint64)
    assert row_identities(top, np.array([0])).astype(np.int64).tolist() == [2**63 - 1]
    assert row_identities(top, np.array([1])).tolist() == [0]


class Table:
    """Blocks that nothing is stored of."""

    def __init__(self, name: str, rows: list[int]) -> None:
        self.keys = [f"{name}/{number}" for number in range(len(rows))]
        self.identities = np.array([name_hash(key) for key in self.keys], dtype=np.uint64)
        self.rows = np.array(rows, dtype=np.int64)


def plan_of(*tables: Table) -> TrainPlan:
    names = [""] if len(tables) == 1 else [f"m{number}" for number in range(len(tables))]
    members = [whole_member(table, name) for name, table in zip(names, tables, strict=True)]
    return TrainPlan(seed=3, members=members, blocks_per_group=4)


PLANS = {
    "one": plan_of(Table("a", [5, 7, 3, 8, 6, 9, 4])),
    "mixture": plan_of(Table("a", [5, 7, 3]), Table("b", [6, 2, 9, 4])),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("first", [0, 36])
def test_a_global_batch_has_the_same_rows_in_the_order_of_their_blocks(name: str, first: int) -> None:
    plan, size = PLANS[name], 12
    sorted_plan = ByBlock(plan, first=first, size=size)
    for start in range(first, first + 120, size):  # several epochs, whose ends lie within batches
        positions = np.arange(start, start + size)
        ours, theirs = sorted_plan.locate(positions), plan.locate(positions)
        rows = [[*zip(*(getattr(each, n).tolist() for n in vars(each)), strict=True)] for each in (ours, theirs)]
        assert sorted(rows[0]) == sorted(rows[1])
        places = list(zip(ours.member.tolist(), ours.block.tolist(), ours.row.tolist(), strict=True))
        assert places == sorted(places)


def test_slices_of_several_batches_at_once_and_in_any_order() -> None:
    plan = ByBlock(PLANS["one"], first=7, size=10)
    one_by_one = np.concatenate([plan.locate(np.array([position])).keys for position in range(7, 57)])
    shuffled = np.random.default_rng(0).permutation(50)
    assert (plan.locate(7 + shuffled).keys == one_by_one[shuffled]).all()


def nodes(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, each: int) -> None:
    """The variables of torchrun."""
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, str(value))


def windows(
    config: Config, monkeypatch: pytest.MonkeyPatch, world: int, each: int, count: int, cursor: int = 0
) -> list[list[list[Batch]]]:
    """The windows of all ranks, [steps][ranks], with `each` ranks on a machine."""
    found: list[list[list[Batch]]] = [[] for _ in range(count)]
    for rank in range(world):
        nodes(monkeypatch, rank, world, each)
        sources = open_sources(config, rank=rank, world=world)
        sources.train.seek(cursor)
        for step in range(count):
            found[step].append(sources.train.next_window())
        sources.close()
    return found


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", block_rows=[[6, 6], [6, 6], [6, 6], [6, 6]])


def by_key(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = batch["keys"].argsort()
    return {name: values[order] for name, values in batch.items()}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_machines_see_the_same_global_batches(workers: int, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(stored, batch={"global_size": 12, "micro_size": 3}, data={"workers": workers})
    found = [joined(step) for step in windows(config, monkeypatch, world=4, each=2, count=6)]
    monkeypatch.undo()
    expected = steps(config, world=1, count=6)
    assert_same([by_key(one) for one in found], [by_key(one) for one in expected])
    assert any((one["keys"] != other["keys"]).any() for one, other in zip(found, expected, strict=True))


def test_ranks_of_one_machine_get_what_they_got(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(stored, batch={"global_size": 12, "micro_size": 3})
    found = [joined(step) for step in windows(config, monkeypatch, world=4, each=4, count=4)]
    monkeypatch.undo()
    assert_same(found, steps(config, world=4, count=4))


def test_going_on_gives_the_windows_of_a_run_that_was_not_stopped(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(stored, batch={"global_size": 12, "micro_size": 3})
    whole = windows(config, monkeypatch, world=2, each=1, count=4)
    rest = windows(config, monkeypatch, world=2, each=1, count=2, cursor=24)
    assert_same([joined(step) for step in rest], [joined(step) for step in whole[2:]])
    starts = [[micro.start for micro in window] for window in rest[0]]
    assert starts == [[24, 27], [30, 33]], "dropout is drawn from these"


def test_a_machine_reads_fewer_blocks() -> None:
    plan = plan_of(Table("a", [64] * 32))

    def blocks(located: Any) -> int:
        return sum(
            len(np.unique(located.locate(np.arange(start + first, start + first + 64)).block))
            for start in range(0, 2048, 256)
            for first in range(0, 256, 64)
        )

    assert blocks(ByBlock(plan, first=0, size=256)) * 3 < blocks(plan)


def test_nodes_by_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    by_torchrun |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert ranks_of_node(by_torchrun) == NodeRanks(first=4, count=4, world=8)
    assert not ranks_of_node({}).several
    by_hand = {name: by_torchrun[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert not ranks_of_node(by_hand).several, "how many share a machine is not known"
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NODEID": "1"}
    assert ranks_of_node(slurm) == NodeRanks(first=4, count=2, world=6)
    assert ranks_of_node({**slurm, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).several, "both nodes say so"


def test_the_share_of_a_machine() -> None:
    share = Share(first=10, size=8, read=range(4, 6))
    assert share.select(np.arange(10, 34)).tolist() == [14, 15, 22, 23, 30, 31]


GOLDEN_SPLIT = [8, 11, 54, 56, 71, 101, 114, 173, 179, 181, 183, 195]
GOLDEN_DOWNSTREAM = [3, 6, 9, 10, 12, 14, 17, 21, 30, 35, 36, 37, 47, 48, 52, 54, 55, 56]


def identities(count: int) -> Words:
    return np.array([name_hash(f"text-{number:06d}") for number in range(count)], dtype=np.uint64)


def test_share_and_stability() -> None:
    chosen = held_out(identities(20_000), 0.05, where="d")
    assert abs(chosen.mean() - 0.05) < 0.006  # 4 standard deviations
    more = held_out(identities(30_000), 0.05, where="d")
    assert (more[:20_000] == chosen).all()  # new blocks move no old one
    larger = held_out(identities(20_000), 0.1, where="d")
    assert larger[chosen].all()  # a larger share keeps what was held out


def test_golden_blocks() -> None:
    assert np.flatnonzero(held_out(identities(200), 0.05, where="d")).tolist() == GOLDEN_SPLIT


def test_at_least_one_and_never_all() -> None:
    few = identities(3)
    chosen = held_out(few, 1e-9, where="d")
    assert np.flatnonzero(chosen).tolist() == [int(np.argmin(few))]
    assert not held_out(few, 0.0, where="d").any()
    with pytest.raises(RefusedError, match=r"all 1 blocks.* --rows_per_block, .* --data\.validation_fraction 0"):
        held_out(identities(1), 0.01, where="d")
    with pytest.raises(RefusedError, match="0 <= fraction < 1"):
        held_out(few, 1.0, where="d")


def test_downstream_knows_nothing_of_what_is_held_out() -> None:
    """By the same hash, holding out a fifth would leave D_val empty."""
    held = held_out(identities(20_000), 0.2, where="d")
    chosen = downstream_validation(identities(20_000), 0.2, training=~held, where="d")
    assert not (chosen & held).any() and abs(chosen[~held].mean() - 0.2) < 0.013
    every = downstream_validation(identities(20_000), 0.2, training=np.ones_like(held), where="d")
    assert (every[~held] == chosen[~held]).all()  # what is held out moves no other block
    assert np.flatnonzero(every[:60]).tolist() == GOLDEN_DOWNSTREAM


def test_downstream_parts_are_never_empty() -> None:
    two = np.ones(2, dtype=np.bool_)
    assert downstream_validation(identities(2), 1e-9, training=two, where="d").sum() == 1
    with pytest.raises(RefusedError, match=r"d: .*all 2 training blocks into D_val, .*smaller --rows_per_block"):
        downstream_validation(identities(2), 1 - 1e-9, training=two, where="d")
    for share in (0.0, 1.0):
        with pytest.raises(RefusedError, match=r"--multilevel\.validation_share is [01]\.0, allowed"):
            downstream_validation(identities(2), share, training=two, where="d")
