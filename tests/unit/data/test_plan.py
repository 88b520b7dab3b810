"""The one global order: golden values, every row once an epoch, purity."""

from __future__ import annotations

import numpy as np

from trp_scale.data.hashing import Integers, name_hash
from trp_scale.data.plan import Order, row_identities

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


def test_rows_of_a_group_mix() -> None:
    blocks = order(blocks_per_group=7).locate(np.arange(23)).block
    assert (np.diff(blocks) != 0).sum() > 10  # unshuffled there would be six changes of block


def test_row_identities_fit_into_int64() -> None:
    top = np.array([2**64 - 1], dtype=np.uint64)
    assert row_identities(top, np.array([0])).astype(np.int64).tolist() == [2**63 - 1]
    assert row_identities(top, np.array([1])).tolist() == [0]
