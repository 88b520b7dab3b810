"""Map positions in a source to addresses of rows: order, mixture and split, independent of the content of rows.

The global order is a pure function of the seed: position in a source -> (epoch, block, row). It is part of the format
of a run: a resume, another number of ranks and workers that fetch ahead rely on it. Any change breaks every resume.

    epoch     = position div rows of the source
    blocks    permuted by hash of (seed, "order of blocks", source, epoch) and the block's identity
    groups    `data.blocks_per_group` consecutive blocks of that order
    rows      of one group permuted by hash of (seed, "order of rows", source, epoch) and the row's identity

Rows are thus shuffled within a group (tens of megabytes), and reads stay within few blocks at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers, Words, mix, name_hash, permutation, stream
from trp_scale.data.mixture import Mixture
from trp_scale.storage.files import NodeArray, content_key, node_array

_GROUPS_KEPT = 4


class Located(NamedTuple):
    """Epoch, block and row within the block of each position, [R] int64."""

    epoch: Integers
    block: Integers
    row: Integers


class _Epoch(NamedTuple):
    blocks: NodeArray  # [n] int32, blocks in this epoch's order
    ends: NodeArray  # [groups] rows up to the end of each group


class Order:
    """Order of one source.

    Args:
        seed: training.seed.
        name: name of the source; the order depends on it.
        identities: [n] uint64, identity of each block (`hashing.name_hash` of its key).
        rows: [n] integers, rows of each block, all at least 1.
        blocks_per_group: blocks whose rows are shuffled together.
    """

    def __init__(
        self,
        *,
        seed: int,
        name: str,
        identities: Words | NodeArray,
        rows: Integers | NodeArray,
        blocks_per_group: int,
    ) -> None:
        self._identities = identities if isinstance(identities, NodeArray) else NodeArray(identities)
        self._block_rows = rows if isinstance(rows, NodeArray) else NodeArray(rows)
        rows = self._block_rows.values
        if len(rows) == 0 or int(rows.min()) < 1:
            raise ValueError(f"source {name!r}: {len(rows)} blocks, each needs at least one row")
        if blocks_per_group < 1:
            raise RefusedError(f"data.blocks_per_group: {blocks_per_group} found, at least 1 allowed")
        self.rows = int(rows.sum(dtype=np.int64))
        self._seed, self._name = seed, name
        self._key = ""
        self._blocks_per_group = blocks_per_group
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], tuple[Integers, Integers]] = OrderedDict()

    def locate(self, positions: Integers) -> Located:
        """Locate positions, [R], of any epochs and in any order."""
        epochs, within = np.divmod(positions, self.rows)  # [R]
        block, row = np.empty_like(within), np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            plan = self._epoch(epoch)
            of_epoch = epochs == epoch
            groups = np.where(of_epoch, np.searchsorted(plan.ends.values, within, side="right"), -1)
            for group in np.unique(groups[of_epoch]).tolist():
                of_group = groups == group
                start = int(plan.ends.values[group - 1]) if group else 0
                blocks, rows = self._group(epoch, group)
                block[of_group] = blocks[within[of_group] - start]
                row[of_group] = rows[within[of_group] - start]
        return Located(epochs, block, row)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            count = len(self._identities)
            blocks = node_array(count, lambda: self._array_key("blocks", epoch), lambda: self._permute(epoch))
            ends = node_array(count, lambda: self._array_key("ends", epoch), lambda: self._ends(blocks.values))
            self._epochs[epoch] = _Epoch(blocks, ends)
            if len(self._epochs) > 2:  # in practice a batch spans at most two
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _permute(self, epoch: int) -> npt.NDArray[np.int32]:
        state = stream(self._seed, "order of blocks", self._name, epoch)
        return permutation(state, self._identities.values).astype(np.int32)  # at most 2^24

    def _ends(self, blocks: npt.NDArray[np.int32]) -> Integers:
        first = np.arange(0, len(blocks), self._blocks_per_group)
        ends: Integers = np.add.reduceat(self._block_rows.values[blocks], first, dtype=np.int64).cumsum()
        return ends

    def _array_key(self, what: str, epoch: int) -> str:
        """Key of the shared file of one of an epoch's arrays."""
        if not self._key:
            parts = (self._seed, self._name, self._blocks_per_group)
            self._key = content_key(*parts, self._identities.values, self._block_rows.values)
        return content_key(self._key, what, epoch)

    def _group(self, epoch: int, group: int) -> tuple[Integers, Integers]:
        """Return block and row of each shuffled position of a group."""
        if (epoch, group) not in self._groups:
            first = group * self._blocks_per_group
            blocks = self._epoch(epoch).blocks.values[first : first + self._blocks_per_group].astype(np.int64)
            counts = self._block_rows.values[blocks].astype(np.int64)
            block = np.repeat(blocks, counts)  # [rows of the group]
            row = np.arange(len(block)) - np.repeat(counts.cumsum() - counts, counts)
            state = stream(self._seed, "order of rows", self._name, epoch)
            shuffled = permutation(state, row_identities(self._identities.values[block], row))
            self._groups[epoch, group] = block[shuffled], row[shuffled]
            if len(self._groups) > _GROUPS_KEPT:
                self._groups.popitem(last=False)
        return self._groups[epoch, group]


def row_identities(blocks: Words, rows: Integers) -> Words:
    """Identity of each row, [R] uint64: identity of its block + row, modulo 2^63 to fit int64."""
    identities: Words = (blocks + rows.astype(np.uint64)) & np.uint64((1 << 63) - 1)
    return identities


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Addresses of the rows of one micro-batch, [R] each.

    Attributes:
        member: number of the data set in a mixture.
        block: number of the block in its data set.
        row: row within the block.
        epoch: epoch of the member.
        keys: row key, int64 >= 0: a stable identity of the row; -1 without a row.
        present: `False` for padding beyond the end of a split.
    """

    member: Integers
    block: Integers
    row: Integers
    epoch: Integers
    keys: Integers
    present: npt.NDArray[np.bool_]


def row_states(addresses: Addresses, *, seed: int, maskings: int) -> Words:
    """Hash each row and masking to the word from which its masks, pairs and crops are drawn, [R].

    Args:
        addresses: addresses of the rows.
        seed: training.seed.
        maskings: masking.maskings; 0 draws a fresh masking each epoch.
    """
    masking = addresses.epoch % maskings if maskings > 0 else addresses.epoch
    states = mix(addresses.keys.astype(np.uint64) ^ np.uint64(stream(seed, "rows")))
    return mix(states ^ masking.astype(np.uint64))


class Blocks(Protocol):
    """Blocks of a data set, for order and split.

    Attributes:
        keys: [n] names, unique in the data set.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] rows of each block.
    """

    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def identities(self) -> Words: ...
    @property
    def rows(self) -> Integers: ...


class Plan(Protocol):
    """Pure function from positions to addresses. `rows`: rows per epoch (of all members of a mixture)."""

    rows: int

    def locate(self, positions: Integers) -> Addresses: ...


@dataclass(frozen=True, kw_only=True)
class MixtureMember:
    """Data set in a source.

    Attributes:
        name: name in the mixture; "" without a mixture.
        weight: weight in the mixture.
        table: all blocks of the data set.
        chosen: [n] bool, blocks of this source (train or held out).
    """

    name: str
    weight: Fraction
    table: Blocks
    chosen: npt.NDArray[np.bool_]

    def identities(self) -> Words:
        """Identity of every block, [n]; it depends on the member's name, as members may share block keys."""
        if not self.name:
            return self.table.identities
        names = [name_hash(f"{self.name}/{key}") for key in self.table.keys]
        return np.array(names, dtype=np.uint64)


class _ChosenBlocks:
    """Blocks of one member that belong to a source, as arrays that all processes of a machine share.

    Attributes:
        numbers: [n] numbers of the chosen blocks in the table; `None` if all are chosen.
        chosen_identities, chosen_rows: [n] of the chosen blocks.
    """

    def __init__(self, member: MixtureMember) -> None:
        chosen, table = member.chosen, member.table
        count, every = len(chosen), bool(chosen.all())
        self.numbers: NodeArray | None = None
        if every and not member.name:  # no copy needed
            self.chosen_identities, self.chosen_rows = NodeArray(table.identities), NodeArray(table.rows)
            return
        packed = np.packbits(chosen)
        self.numbers = node_array(
            count, lambda: content_key("numbers", packed), lambda: np.flatnonzero(chosen).astype(np.int32)
        )
        self.chosen_identities = node_array(
            count,
            lambda: content_key("identities", member.name, packed, table.identities),
            lambda: member.identities()[chosen],
        )
        self.chosen_rows = node_array(
            count, lambda: content_key("rows", packed, table.rows), lambda: table.rows[chosen].astype(np.int32)
        )

    def in_table(self, blocks: Integers) -> Integers:
        """Convert numbers of chosen blocks to numbers in the table, [R]."""
        return blocks if self.numbers is None else self.numbers.values[blocks].astype(np.int64)


class TrainPlan:
    """Endless global order of the training rows (`Order`), over the members of a mixture (mixture.py)."""

    def __init__(self, *, seed: int, members: Sequence[MixtureMember], blocks_per_group: int) -> None:
        self._mixture = Mixture(seed=seed, names=[m.name for m in members], weights=[m.weight for m in members])
        self._sources = [_ChosenBlocks(member) for member in members]
        self._orders = [
            Order(
                seed=seed,
                name=member.name,
                identities=source.chosen_identities,
                rows=source.chosen_rows,
                blocks_per_group=blocks_per_group,
            )
            for member, source in zip(members, self._sources, strict=True)
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
            source = self._sources[number]
            blocks = source.in_table(located.block)
            block[of_member], row[of_member], epoch[of_member] = blocks, located.row, located.epoch
            identities = source.chosen_identities.values[located.block]
            keys[of_member] = row_identities(identities, located.row).astype(np.int64)
        present = np.ones(len(positions), dtype=np.bool_)
        return Addresses(member=member, block=block, row=row, epoch=epoch, keys=keys, present=present)


class ByBlock:
    """Plan with the rows of each global batch sorted by block.

    Ranks take slices of a batch, so that ranks of one machine read the same few blocks. The rows of a global batch do
    not change, and neither do their draws, which depend on the row key.

    Args:
        plan: unsorted plan.
        first: position at which a global batch starts.
        size: rows of a global batch.
    """

    def __init__(self, plan: Plan, *, first: int, size: int) -> None:
        self.rows = plan.rows
        self._plan, self._first, self._size = plan, first, size
        self._sorted: OrderedDict[int, Addresses] = OrderedDict()

    def locate(self, positions: Integers) -> Addresses:
        """Addresses of the rows at `positions`, [R]; all are at least `first`."""
        batches, places = np.divmod(positions - self._first, self._size)  # [R]
        numbers, which = np.unique(batches, return_inverse=True)
        parts = [self._batch(number) for number in numbers.tolist()]

        def joined(name: str) -> npt.NDArray[Any]:
            whole = np.stack([getattr(batch, name) for batch in parts])  # [batches, B]
            values: npt.NDArray[Any] = whole[which, places]
            return values

        return Addresses(**{name: joined(name) for name in ("member", "block", "row", "epoch", "keys", "present")})

    def _batch(self, number: int) -> Addresses:
        if number not in self._sorted:
            first = self._first + number * self._size
            rows = self._plan.locate(np.arange(first, first + self._size, dtype=np.int64))
            order = np.lexsort((rows.row, rows.block, rows.member))  # stable: equal rows of two epochs keep their order
            self._sorted[number] = Addresses(**{name: values[order] for name, values in vars(rows).items()})
            if len(self._sorted) > _GROUPS_KEPT:
                self._sorted.popitem(last=False)
        return self._sorted[number]


class HeldOutPlan:
    """Held-out rows in stored order, once, all in epoch 0; positions beyond the last row are not present.

    Args:
        members: members whose chosen blocks are held out.
        most: limit of rows, counted from the first; `None` for all.
    """

    def __init__(self, *, members: Sequence[MixtureMember], most: int | None = None) -> None:
        blocks = [np.flatnonzero(member.chosen) for member in members]
        self._member = np.repeat(np.arange(len(members)), [len(chosen) for chosen in blocks])  # [held-out blocks]
        self._block = np.concatenate(blocks)
        self._identities = np.concatenate([m.identities()[b] for m, b in zip(members, blocks, strict=True)])
        rows = np.concatenate([m.table.rows[b] for m, b in zip(members, blocks, strict=True)])
        self._ends = np.cumsum(rows)
        self._starts = self._ends - rows
        self.rows = int(rows.sum()) if most is None else min(most, int(rows.sum()))

    def locate(self, positions: Integers) -> Addresses:
        """Addresses of the rows at `positions`, [R]."""
        present = positions < self.rows
        safe = np.where(present, positions, 0)
        position = np.searchsorted(self._ends, safe, side="right")
        row = safe - self._starts[position]
        keys = row_identities(self._identities[position], row).astype(np.int64)
        return Addresses(
            member=self._member[position],
            block=self._block[position],
            row=row,
            epoch=np.zeros_like(row),
            keys=np.where(present, keys, -1),
            present=present,
        )


_DOWNSTREAM = np.uint64(name_hash("downstream validation"))


def held_out(identities: Words, fraction: float, *, where: str) -> npt.NDArray[np.bool_]:
    """Return a mask [n] of held-out blocks: identity / 2^64 < fraction; the lowest if there is none and fraction > 0.

    The split takes whole blocks: neighbouring rows come from the same documents and are partners in next-sentence
    pairs. The choice depends on the block's key only, not on seed or other blocks: added data moves no block.

    Args:
        identities: [n] uint64 of the blocks (`OrderBlocks.identities`).
        fraction: data.validation_fraction, in [0, 1).
        where: name of the data set for messages.

    Raises:
        RefusedError: fraction outside [0, 1), or no block remains for training.
    """
    if not 0.0 <= fraction < 1.0:
        raise RefusedError(f"data.validation_fraction: {fraction} found, 0 <= fraction < 1 allowed")
    if fraction == 0.0:
        return np.zeros(len(identities), dtype=np.bool_)
    chosen = _lowest(identities, fraction)
    if chosen.all():
        raise RefusedError(
            f"{where}: data.validation_fraction {fraction} holds out all {len(identities)} blocks, none remains for "
            f"training; shard the data again with a smaller --rows_per_block, or set --data.validation_fraction 0 "
            f"and --validation.every 0"
        )
    return chosen


def downstream_validation(
    identities: Words, share: float, *, training: npt.NDArray[np.bool_], where: str
) -> npt.NDArray[np.bool_]:
    """Return a mask [n] of the training blocks in D_val; the other training blocks are D_tr (MLO-MAE B.3).

    Like `held_out`, with a second, independent hash of the block's key.

    Args:
        identities: [n] uint64 of the blocks.
        share: multilevel.validation_share, in (0, 1).
        training: [n], blocks that are not held out.
        where: name of the data set for messages.

    Raises:
        RefusedError: share outside (0, 1), or D_tr or D_val would be empty.
    """
    if not 0.0 < share < 1.0:
        raise RefusedError(f"--multilevel.validation_share is {share}, allowed: more than 0 and below 1")
    chosen = np.zeros_like(training)
    chosen[training] = _lowest(mix(identities[training] ^ _DOWNSTREAM), share)
    if (chosen == training).all():
        raise RefusedError(
            f"{where}: --multilevel.validation_share {share} puts all {training.sum()} training blocks into D_val, "
            f"none remains for D_tr; shard the data again with a smaller --rows_per_block, or lower the share"
        )
    return chosen


def _lowest(words: Words, fraction: float) -> npt.NDArray[np.bool_]:
    """Return a mask [n] of words below fraction x 2^64; the lowest word if there is none."""
    chosen: npt.NDArray[np.bool_] = words.astype(np.float64) / 2.0**64 < fraction
    if not chosen.any():
        chosen[np.argmin(words)] = True
    return chosen
