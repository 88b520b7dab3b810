"""Weighted mixtures: a pure function of the seed from a position to (member, position in that member).

Positions form cycles. Each cycle holds exactly weight x cycle slots of each member, in an order that is hashed per
cycle: shares are exact and no member starves. Slot b of a member with n slots per cycle is position cycle x n + b of
that member, so a member repeats a row only after an epoch of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.config.loader import data_command
from trp_scale.data.hashing import PLACE_BITS, Integers, mix, stream
from trp_scale.data.mirror import local_directory
from trp_scale.data.raw_files import require_dataset
from trp_scale.errors import DataError
from trp_scale.storage.transfer import is_url

if TYPE_CHECKING:  # loader workers import this file without the command line
    from trp_scale.config.run_flags import Arguments

LONGEST_CYCLE = 1 << 16

_MEMBER = re.compile(r"(?P<name>[A-Za-z0-9_.-]+):(?P<weight>[0-9]+(\.[0-9]+)?)=(?P<path>.+)")


@dataclass(frozen=True, kw_only=True)
class MemberPath:
    """Data set of a mixture: name ("" without a mixture), weight and directory."""

    name: str
    weight: Fraction
    path: Path


def parse_paths(text: str) -> list[MemberPath]:
    """Parse `data.path`: a directory, or 'name:weight=directory' several times with commas between.

    A directory may be a URL: its small files are then fetched, and the path is that of its mirror (mirror.py).

    Raises:
        DataError: the URL has no data set.
        RefusedError: as `parse_members`.
    """
    return [MemberPath(name=n, weight=w, path=local_directory(location)) for n, w, location in parse_members(text)]


def parse_members(text: str) -> list[tuple[str, Fraction, str]]:
    """Parse name, weight and directory or URL of each data set of `data.path`; no file is accessed.

    Raises:
        RefusedError: empty, a member without name or weight, a weight of 0, or a repeated name.
    """
    if not text.strip():
        raise RefusedError(
            "data.path is empty; give a directory with dataset.json (--data.path DIR), or 'books:0.7=/a,wiki:0.3=/b'"
        )
    parts = [part.strip() for part in text.split(",")]
    if not _MEMBER.fullmatch(parts[0]):
        return [("", Fraction(1), text)]
    members = []
    for part in parts:
        match = _MEMBER.fullmatch(part)
        if match is None:
            raise RefusedError(f"data.path: {part!r} found, 'name:weight=directory' expected (in {text!r})")
        members.append((match["name"], Fraction(match["weight"]), match["path"]))
        if members[-1][1] == 0:
            raise RefusedError(
                f"data.path: weight of {match['name']!r} is 0; leave the member out, or give it a weight"
            )
    names = [name for name, _, _ in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RefusedError(f"data.path: name {twice[0]!r} is used twice; give each member a name of its own")
    return members


def format_paths(shares: Mapping[str, float], directories: Mapping[str, object], *, total: int) -> str:
    """Return the `data.path` of data sets by name, with their shares as whole weights of at least 1 whose sum is about
    `total`."""
    parts = sum(shares.values())
    weights = {name: max(1, round(total * share / parts)) for name, share in shares.items()}
    return ",".join(f"{name}:{weights[name]}={directory}" for name, directory in directories.items())


def require_run_data(arguments: Arguments) -> None:
    """Refuse a run without its data, without an import or a download. URLs are not checked.

    Raises:
        DataError: a directory is not a data set, or the recipe's does not exist; names the command that creates it.
        RefusedError: as `parse_members`.
    """
    path = arguments.config.data.path
    made_by = data_command(arguments.recipe, path)
    if made_by and not Path(path).exists():
        raise DataError(f"--data.path {path}: not found; create it: {made_by}")
    for name, text in arguments.config.datasets().items():
        for _, _, location in parse_members(text):
            if not is_url(location):
                require_dataset(Path(location), f"--{name} {location}")


def describe_shares(paths: Sequence[MemberPath]) -> list[str]:
    """Return a line with the shares of a mixture if its weights neither sum to 1 nor are whole numbers."""
    total = sum((path.weight for path in paths), Fraction(0))
    if total == 1 or all(path.weight.denominator == 1 for path in paths):
        return []
    shares = ", ".join(f"{path.name} {float(path.weight / total):.1%}" for path in paths)
    return [f"the weights of --data.path sum to {float(total):g} and are divided by that: {shares}"]


class Mixture:
    """Assignment of positions to members.

    Args:
        seed: training.seed.
        names: names of the members.
        weights: exact weights; they are normalized to shares.

    Raises:
        RefusedError: the shares need a cycle of more than 65,536 slots.
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
        cycles, remainder = np.divmod(positions, self.cycle)  # [R]
        used, which = np.unique(cycles, return_inverse=True)  # [U], [R]
        states = mix(used.astype(np.uint64) ^ np.uint64(self._state))
        slots = np.arange(self.cycle, dtype=np.uint64)
        low = np.uint64((1 << PLACE_BITS) - 1)
        words = (mix(states[:, None] ^ slots[None, :]) & ~low) | slots  # [U, cycle]
        words.sort(axis=1)
        slot = (words[which, remainder] & low).astype(np.int64)  # [R]
        member = self._member_of_slot[slot]
        return member, cycles * self.slots[member] + slot - self._first_slot[member]
