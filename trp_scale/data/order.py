"""The one global order: position in a source -> (epoch, block, row), a pure function of the seed.

It is part of the format of a run. A resumed run, another number of ranks, and a worker that fetches position i long
before position i - 1 all rely on the same function; changing anything here breaks every resume.

    epoch     = position div rows of the source
    blocks    permuted by hash of (seed, "order of blocks", source, epoch) and the block's identity
    groups    `data.blocks_per_group` blocks that follow each other in that order
    rows      of one group permuted by hash of (seed, "order of rows", source, epoch) and the row's identity

Rows thus mix over a group (tens of megabytes), while reads stay within few blocks at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers, Words, permutation, stream

_GROUPS_KEPT = 4


class Located(NamedTuple):
    """Where positions are: epoch, block and row within the block, each [R] int64."""

    epoch: Integers
    block: Integers
    row: Integers


class _Epoch(NamedTuple):
    blocks: Integers  # [n] blocks in this epoch's order
    ends: Integers  # [groups] rows up to the end of each group


class Order:
    """The order of one source.

    Args:
        seed: training.seed.
        name: name of the source; two sources with the same blocks have different orders.
        identities: [n] uint64, one per block (`hashing.name_hash` of its key).
        rows: [n] int64, rows of each block, all at least 1.
        blocks_per_group: blocks whose rows are shuffled together.
    """

    def __init__(self, *, seed: int, name: str, identities: Words, rows: Integers, blocks_per_group: int) -> None:
        if len(rows) == 0 or int(rows.min()) < 1:
            raise ValueError(f"source {name!r}: {len(rows)} blocks, each needs at least one row")
        if blocks_per_group < 1:
            raise RefusedError(f"data.blocks_per_group: {blocks_per_group} found, at least 1 allowed")
        self.rows = int(rows.sum())
        self._seed, self._name = seed, name
        self._identities, self._block_rows = identities, rows
        self._blocks_per_group = blocks_per_group
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], tuple[Integers, Integers]] = OrderedDict()

    def locate(self, positions: Integers) -> Located:
        """Epoch, block and row of each position, [R]; positions may span epochs and come in any order."""
        epochs, within = np.divmod(positions, self.rows)  # [R]
        block, row = np.empty_like(within), np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            plan = self._epoch(epoch)
            of_epoch = epochs == epoch
            groups = np.where(of_epoch, np.searchsorted(plan.ends, within, side="right"), -1)
            for group in np.unique(groups[of_epoch]).tolist():
                of_group = groups == group
                start = int(plan.ends[group - 1]) if group else 0
                blocks, rows = self._group(epoch, group)
                block[of_group] = blocks[within[of_group] - start]
                row[of_group] = rows[within[of_group] - start]
        return Located(epochs, block, row)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            state = stream(self._seed, "order of blocks", self._name, epoch)
            blocks = permutation(state, self._identities)
            last = np.arange(0, len(blocks), self._blocks_per_group)
            self._epochs[epoch] = _Epoch(blocks, np.add.reduceat(self._block_rows[blocks], last).cumsum())
            if len(self._epochs) > 2:  # a batch spans two at most in practice
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _group(self, epoch: int, group: int) -> tuple[Integers, Integers]:
        """Block and row of each place of a group, in the shuffled order."""
        if (epoch, group) not in self._groups:
            first = group * self._blocks_per_group
            blocks = self._epoch(epoch).blocks[first : first + self._blocks_per_group]
            counts = self._block_rows[blocks]
            block = np.repeat(blocks, counts)  # [rows of the group]
            row = np.arange(len(block)) - np.repeat(counts.cumsum() - counts, counts)
            state = stream(self._seed, "order of rows", self._name, epoch)
            shuffled = permutation(state, row_identities(self._identities[block], row))
            self._groups[epoch, group] = block[shuffled], row[shuffled]
            if len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        return self._groups[epoch, group]


def row_identities(blocks: Words, rows: Integers) -> Words:
    """Identity of each row, [R] uint64: that of its block plus its place in it, modulo 2^63 (so that it fits int64)."""
    identities: Words = (blocks + rows.astype(np.uint64)) & np.uint64((1 << 63) - 1)
    return identities
