"""Which elements of a whole tensor a stored piece holds: a flat range, or a box.

ZeRO splits the flattened parameter, FSDP2 its rows (also a flat range), tensor parallelism its columns (a box). Both
kinds are the same thing underneath: runs of equal length in the flattened tensor. All arithmetic here is on runs, so
that any way of splitting can be read into any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from trp_scale.checkpoint.errors import CheckpointError

Integers = NDArray[np.int64]

_FLAT = re.compile(r"^@(\d+):(\d+)$")
_BOX = re.compile(r"^#\[(\d+:\d+(?:,\d+:\d+)*)\]$")


@dataclass(frozen=True)
class Runs:
    """Runs of equal length in a flattened tensor.

    Attributes:
        starts: [R] int64, ascending, first element of each run; runs do not touch each other.
        length: elements of one run. The piece stores run after run: run i begins at element i * length of the piece.
    """

    starts: Integers
    length: int


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of the tensor flattened row by row."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"@{self.start}:{self.stop}"

    @property
    def size(self) -> int:
        return self.stop - self.start

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the range lies inside a tensor of this shape and is not empty."""
        return 0 <= self.start < self.stop <= prod(shape)

    def runs(self, shape: Sequence[int]) -> Runs:
        """One run, whatever the shape."""
        return Runs(np.array([self.start], dtype=np.int64), self.size)


@dataclass(frozen=True)
class Box:
    """Elements of the tensor with start <= index < stop in every dimension, stored row by row."""

    bounds: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return "#[" + ",".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"

    @property
    def size(self) -> int:
        return prod(stop - start for start, stop in self.bounds)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape and is not empty."""
        if len(self.bounds) != len(shape):
            return False
        return all(0 <= start < stop <= length for (start, stop), length in zip(self.bounds, shape, strict=True))

    def runs(self, shape: Sequence[int]) -> Runs:
        """Trailing dimensions that are whole join the last one that is cut: a box of whole rows is one run."""
        last = len(shape) - 1
        while last > 0 and self.bounds[last] == (0, shape[last]):
            last -= 1
        stride = prod(shape[last + 1 :])
        start, stop = self.bounds[last]
        length = (stop - start) * stride
        starts = np.array([start * stride], dtype=np.int64)  # [1]
        for dimension in range(last - 1, -1, -1):
            stride *= shape[dimension + 1]
            outer = np.arange(*self.bounds[dimension], dtype=np.int64) * stride
            starts = (outer[:, None] + starts[None, :]).reshape(-1)  # [indices of this dimension x runs so far]
        return Runs(starts, length)


Region = FlatRange | Box


def parse_region(text: str) -> Region | None:
    """The inverse of str(region); None where `text` is neither kind."""
    if flat := _FLAT.match(text):
        return FlatRange(int(flat[1]), int(flat[2]))
    if box := _BOX.match(text):
        pairs = [bound.split(":") for bound in box[1].split(",")]
        return Box(tuple((int(start), int(stop)) for start, stop in pairs))
    return None


def overlap(stored: Runs, wanted: Runs) -> tuple[Integers, Integers, Integers]:
    """Common elements of two pieces, as segments.

    Returns:
        [S] offsets in the stored piece, [S] offsets in the wanted piece, [S] lengths. Both offsets ascend.
    """
    first = np.searchsorted(stored.starts + stored.length, wanted.starts, side="right")
    behind = np.searchsorted(stored.starts, wanted.starts + wanted.length, side="left")
    counts = np.maximum(behind - first, 0)  # [W] stored runs that meet each wanted run
    wanted_run = np.repeat(np.arange(len(wanted.starts)), counts)  # [S]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    stored_run = np.repeat(first, counts) + within  # [S]
    begin = np.maximum(stored.starts[stored_run], wanted.starts[wanted_run])
    end = np.minimum(stored.starts[stored_run] + stored.length, wanted.starts[wanted_run] + wanted.length)
    in_stored = begin - stored.starts[stored_run] + stored_run * stored.length
    in_wanted = begin - wanted.starts[wanted_run] + wanted_run * wanted.length
    return in_stored, in_wanted, end - begin


def check_covered_once(what: str, shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Check that the regions hold every element of the tensor exactly once.

    Raises:
        CheckpointError: naming `what` and the first elements that are outside the tensor, missing or held twice.
    """
    total = prod(shape)
    for region in regions:
        if not region.fits(shape):
            raise CheckpointError(f"{what}: the piece {region} is empty or lies outside the shape {tuple(shape)}")
    runs = [region.runs(shape) for region in regions]
    starts = np.concatenate([np.empty(0, np.int64), *(each.starts for each in runs)])
    stops = np.concatenate([np.empty(0, np.int64), *(each.starts + each.length for each in runs)])
    order = np.argsort(starts, kind="stable")
    begin = np.append(starts[order], total)
    end = np.insert(stops[order], 0, 0)
    wrong = np.flatnonzero(begin != end)
    if len(wrong) == 0:
        return
    at, reached = int(begin[wrong[0]]), int(end[wrong[0]])
    if at > reached:
        raise CheckpointError(f"{what}: elements {reached}:{at} of {total} are in no piece")
    raise CheckpointError(f"{what}: elements {at}:{reached} of {total} are in more than one piece")
