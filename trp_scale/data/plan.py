"""From positions in a source to addresses of rows: order, mixture and split put together, whatever the rows hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trp_scale.data.hashing import Integers, Words, mix, name_hash, stream
from trp_scale.data.mixture import Mixture
from trp_scale.data.order import Order, row_identities


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the rows of one micro-batch are, [R] each.

    Attributes:
        member: number of the data set in a mixture.
        block: number of the block in its data set's table.
        row: place in the block.
        epoch: epoch of the member that the row belongs to.
        keys: row key, int64 >= 0: a stable name of the row; -1 where there is none.
        present: False for places beyond the end of a split, which are filled up with nothing.
    """

    member: Integers
    block: Integers
    row: Integers
    epoch: Integers
    keys: Integers
    present: npt.NDArray[np.bool_]


def row_states(addresses: Addresses, *, seed: int, maskings: int) -> Words:
    """The word of each row and masking from which all its draws come, [R]: masks, pairs, crops.

    Args:
        addresses: of the rows.
        seed: training.seed.
        maskings: masking.maskings; 0 = a fresh masking each epoch.
    """
    masking = addresses.epoch % maskings if maskings > 0 else addresses.epoch
    states = mix(addresses.keys.astype(np.uint64) ^ np.uint64(stream(seed, "rows")))
    return mix(states ^ masking.astype(np.uint64))


class Blocks(Protocol):
    """What order and split need to know of a data set's blocks, whatever their rows are.

    Attributes:
        keys: [n] names, unique in the data set.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] rows of each block.
    """

    @property
    def keys(self) -> list[str]: ...
    @property
    def identities(self) -> Words: ...
    @property
    def rows(self) -> Integers: ...


class Plan(Protocol):
    """A pure function from positions to addresses. `rows`: rows per epoch (of a mixture: of all its members)."""

    rows: int

    def locate(self, positions: Integers) -> Addresses: ...


@dataclass(frozen=True, kw_only=True)
class Member:
    """One data set's part in a source.

    Attributes:
        name: its name in the mixture, "" when it is the only one.
        weight: its share.
        table: all of its blocks.
        chosen: [n] bool, the blocks of this source (train or held out).
    """

    name: str
    weight: Fraction
    table: Blocks
    chosen: npt.NDArray[np.bool_]

    def identities(self) -> Words:
        """Identity of every block, [n]: data sets of a mixture may use the same block keys, so their name goes in."""
        if not self.name:
            return self.table.identities
        names = [name_hash(f"{self.name}/{key}") for key in self.table.keys]
        return np.array(names, dtype=np.uint64)


class TrainPlan:
    """The endless global order of the training rows (order.py), over the members of a mixture (mixture.py)."""

    def __init__(self, *, seed: int, members: Sequence[Member], blocks_per_group: int) -> None:
        self._mixture = Mixture(seed=seed, names=[m.name for m in members], weights=[m.weight for m in members])
        self._identities = [member.identities() for member in members]
        self._blocks = [np.flatnonzero(member.chosen) for member in members]
        self._orders = [
            Order(
                seed=seed,
                name=member.name,
                identities=identities[blocks],
                rows=member.table.rows[blocks],
                blocks_per_group=blocks_per_group,
            )
            for member, identities, blocks in zip(members, self._identities, self._blocks, strict=True)
        ]
        self.rows = sum(order.rows for order in self._orders)

    def locate(self, positions: Integers) -> Addresses:
        """Addresses of the rows at `positions`, [R]."""
        member, within = self._mixture.locate(positions)  # [R]
        block, row, epoch = np.empty_like(within), np.empty_like(within), np.empty_like(within)
        keys = np.empty_like(within)
        for number in np.unique(member).tolist():
            of_member = member == number
            located = self._orders[number].locate(within[of_member])
            blocks = self._blocks[number][located.block]
            block[of_member], row[of_member], epoch[of_member] = blocks, located.row, located.epoch
            keys[of_member] = row_identities(self._identities[number][blocks], located.row).astype(np.int64)
        present = np.ones(len(positions), dtype=np.bool_)
        return Addresses(member=member, block=block, row=row, epoch=epoch, keys=keys, present=present)


class HeldOutPlan:
    """The held-out rows in stored order, once, all in epoch 0; positions beyond the last row are not present."""

    def __init__(self, *, members: Sequence[Member]) -> None:
        blocks = [np.flatnonzero(member.chosen) for member in members]
        self._member = np.repeat(np.arange(len(members)), [len(chosen) for chosen in blocks])  # [held-out blocks]
        self._block = np.concatenate(blocks)
        self._identities = np.concatenate([m.identities()[b] for m, b in zip(members, blocks, strict=True)])
        rows = np.concatenate([m.table.rows[b] for m, b in zip(members, blocks, strict=True)])
        self._ends = np.cumsum(rows)
        self._starts = self._ends - rows
        self.rows = int(rows.sum())

    def locate(self, positions: Integers) -> Addresses:
        """Addresses of the rows at `positions`, [R]."""
        present = positions < self.rows
        safe = np.where(present, positions, 0)
        place = np.searchsorted(self._ends, safe, side="right")
        row = safe - self._starts[place]
        keys = row_identities(self._identities[place], row).astype(np.int64)
        return Addresses(
            member=self._member[place],
            block=self._block[place],
            row=row,
            epoch=np.zeros_like(row),
            keys=np.where(present, keys, -1),
            present=present,
        )
