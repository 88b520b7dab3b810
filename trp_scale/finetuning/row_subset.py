"""Fine-tuning on a few rows of a data set: which they are, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, mix, stream
from trp_scale.data.plan import Addresses, Blocks, row_identities
from trp_scale.data.sources import Chosen, Rows


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Rows of one data set, each a block of its own, so that the order shuffles them all; see `plan.Blocks`.

    Attributes:
        identities: [n] of the rows; those of a single data set keep the keys that they have in the whole of it.
        block, row: [n] where each is stored.
    """

    identities: Words
    block: Integers
    row: Integers

    @property
    def keys(self) -> Sequence[str]:
        return [f"{block}/{row}" for block, row in zip(self.block.tolist(), self.row.tolist(), strict=True)]

    @property
    def rows(self) -> Integers:
        return np.ones(len(self.block), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ChosenRowsBuilder:
    """Makes batches of chosen rows by the builder of the whole data sets; see `fetch.BatchBuilder`."""

    builder: BatchBuilder
    chosen: Sequence[ChosenRows]

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        block, row = np.zeros_like(addresses.block), np.zeros_like(addresses.row)
        for member, chosen in enumerate(self.chosen):
            here = addresses.present & (addresses.member == member)
            block[here], row[here] = chosen.block[addresses.block[here]], chosen.row[addresses.block[here]]
        return self.builder.build(replace(addresses, block=block, row=row), start)


def draw_rows(whole: Rows, allowed: Sequence[Chosen], count: int, *, seed: int) -> Rows:
    """`count` rows of the data sets, each label's share as in all of them, drawn by the seed. Of two counts the larger
    one holds the smaller one's rows, but for rounding.

    Args:
        whole: the data sets; `labels` of each row, or None: of one kind.
        allowed: [n] of each data set, the blocks that rows may be taken from.
        count: rows in all.

    Raises:
        RefusedError: there are fewer.
    """
    identities, member, block, row = (np.concatenate(parts) for parts in zip(*_places(whole.blocks), strict=True))
    labels = np.zeros(len(block), np.int64) if whole.labels is None else np.concatenate(whole.labels)
    may = np.concatenate([mask[_block_of_rows(blocks)] for blocks, mask in zip(whole.blocks, allowed, strict=True)])
    usable = np.flatnonzero(may)
    if count > len(usable):
        raise RefusedError(
            f"--downstream.rows is {count}, allowed: at most the {len(usable)} training rows, or 0 for all"
        )
    drawn = mix(identities[usable] ^ np.uint64(stream(seed, "few rows")))
    usable = usable[np.lexsort((drawn, labels[usable]))]  # label by label, each in the order drawn
    _, sizes = np.unique(labels[usable], return_counts=True)
    rank = np.arange(len(usable)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a row among its label's
    picked = np.sort(usable[rank < np.repeat(label_counts(sizes, count), sizes)])
    chosen = [
        ChosenRows(identities=identities[rows], block=block[rows], row=row[rows])
        for rows in (picked[member[picked] == number] for number in range(len(whole.blocks)))
    ]
    if empty := [number for number, rows in enumerate(chosen) if not len(rows.block)]:
        raise RefusedError(
            f"--downstream.rows is {count}: none is of data set {empty[0]} of the mixture; allowed: more"
        )
    builder = ChosenRowsBuilder(builder=whole.builder, chosen=chosen)
    return replace(whole, blocks=chosen, builder=builder, labels=None, stored=())


def label_counts(sizes: Integers, count: int) -> Integers:
    """[C] rows of each label -> [C] of `count` rows, in proportion; what rounding leaves goes to the largest
    remainders."""
    exact = count * sizes / sizes.sum()
    rows: Integers = np.floor(exact).astype(np.int64)
    rows[np.argsort(rows - exact, kind="stable")[: count - rows.sum()]] += 1
    return rows


def _block_of_rows(blocks: Blocks) -> Integers:
    numbers: Integers = np.repeat(np.arange(len(blocks.rows)), blocks.rows)
    return numbers


def _places(tables: Sequence[Blocks]) -> list[tuple[Words, Integers, Integers, Integers]]:
    """Columns of each data set's rows in stored order, [n]: identity, number of the data set, block, row in it."""
    columns = []
    for number, blocks in enumerate(tables):
        counts = np.asarray(blocks.rows, dtype=np.int64)
        block = _block_of_rows(blocks)
        row = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        identities = row_identities(np.asarray(blocks.identities)[block], row)
        columns.append((identities, np.full(len(block), number), block, row))
    return columns
