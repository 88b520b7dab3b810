"""Weighted mixtures: position in the mixture -> (member, position in that member), a pure function of the seed.

Positions come in cycles. Each cycle holds exactly weight x cycle slots of each member, in an order hashed per cycle, so
shares are exact and no member is ever starved. Slot b of a member that has n slots in a cycle is position cycle x n + b
of that member: every row of a member once an epoch of *that member*.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.data.hashing import PLACE_BITS, Integers, mix, stream
from trp_scale.data.remote.mirror import local_directory

LONGEST_CYCLE = 1 << 16

_MEMBER = re.compile(r"(?P<name>[A-Za-z0-9_.-]+):(?P<weight>[0-9]+(\.[0-9]+)?)=(?P<path>.+)")


@dataclass(frozen=True, kw_only=True)
class MemberPath:
    """One data set of a mixture: its name ("" when it is the only one), weight and directory."""

    name: str
    weight: Fraction
    path: Path


def parse_paths(text: str) -> list[MemberPath]:
    """Read `data.path`: a directory, or 'name:weight=directory' several times with commas between. A directory may be
    a URL: then its small files are fetched, and the path is that of its mirror (remote/mirror.py).

    Raises:
        DataError: there is no data set under a URL.
        RefusedError: empty, a member without name and weight, a weight of 0, or a name used twice.
    """
    if not text.strip():
        raise RefusedError(
            "data.path is empty; give a directory with dataset.json (--data.path DIR), or 'books:0.7=/a,wiki:0.3=/b'"
        )
    first = text.split(",")[0].strip()
    if not _MEMBER.fullmatch(first):
        return [MemberPath(name="", weight=Fraction(1), path=local_directory(text))]
    members = []
    for part in text.split(","):
        match = _MEMBER.fullmatch(part.strip())
        if match is None:
            raise RefusedError(f"data.path: {part!r} is not 'name:weight=directory' (in {text!r})")
        directory = local_directory(match["path"])
        members.append(MemberPath(name=match["name"], weight=Fraction(match["weight"]), path=directory))
        if members[-1].weight == 0:
            raise RefusedError(
                f"data.path: weight of {match['name']!r} is 0; leave the member out, or give it a weight"
            )
    names = [member.name for member in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RefusedError(f"data.path: name {twice[0]!r} is used twice; names tell the rows of members apart")
    return members


class Mixture:
    """Allocation of positions to members.

    Args:
        seed: training.seed.
        names: names of the members.
        weights: exact shares; they are divided by their sum.

    Raises:
        RefusedError: shares that need a cycle longer than 65,536 slots.
    """

    def __init__(self, *, seed: int, names: list[str], weights: list[Fraction]) -> None:
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        self.cycle = math.lcm(*(share.denominator for share in shares))
        if self.cycle > LONGEST_CYCLE:
            raise RefusedError(
                f"data.path: weights {', '.join(str(float(weight)) for weight in weights)} need a cycle of "
                f"{self.cycle} rows, at most {LONGEST_CYCLE} allowed; write them with fewer decimals"
            )
        self.slots: Integers = np.array([int(share * self.cycle) for share in shares], dtype=np.int64)
        self._member_of_slot = np.repeat(np.arange(len(names)), self.slots)  # [cycle]
        self._first_slot = np.cumsum(self.slots) - self.slots  # [members]
        self._state = stream(seed, "mixture", *names)

    def locate(self, positions: Integers) -> tuple[Integers, Integers]:
        """Member and position in the member, [R] each."""
        if len(self.slots) == 1:
            return np.zeros_like(positions), positions
        cycles, place = np.divmod(positions, self.cycle)  # [R]
        used, which = np.unique(cycles, return_inverse=True)  # [U], [R]
        states = mix(used.astype(np.uint64) ^ np.uint64(self._state))
        slots = np.arange(self.cycle, dtype=np.uint64)
        low = np.uint64((1 << PLACE_BITS) - 1)
        words = (mix(states[:, None] ^ slots[None, :]) & ~low) | slots  # [U, cycle]
        words.sort(axis=1)
        slot = (words[which, place] & low).astype(np.int64)  # [R]
        member = self._member_of_slot[slot]
        return member, cycles * self.slots[member] + slot - self._first_slot[member]
