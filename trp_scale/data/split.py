"""The held-out split: which blocks are for validation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Words


def held_out(identities: Words, fraction: float, *, where: str) -> npt.NDArray[np.bool_]:
    """Which blocks are held out, [n]: those with identity / 2^64 < fraction; at least one if fraction > 0.

    Whole blocks, never single rows: neighbouring rows come from the same documents and are each other's partners in
    next-sentence pairs, so both must stay on one side. The choice depends on the block's key alone, not on the seed or
    on the other blocks, so that data added later moves no block across. If none falls below, the lowest is taken.

    Args:
        identities: [n] uint64 of the blocks (`BlockTable.identities`).
        fraction: data.validation_fraction, in [0, 1).
        where: the data set, for the message.

    Raises:
        RefusedError: fraction outside [0, 1), or nothing would be left to train on.
    """
    if not 0.0 <= fraction < 1.0:
        raise RefusedError(f"data.validation_fraction: {fraction} found, 0 <= fraction < 1 allowed")
    if fraction == 0.0:
        return np.zeros(len(identities), dtype=np.bool_)
    chosen: npt.NDArray[np.bool_] = identities.astype(np.float64) / 2.0**64 < fraction
    if not chosen.any():
        chosen[np.argmin(identities)] = True
    if chosen.all():
        raise RefusedError(
            f"{where}: data.validation_fraction {fraction} holds out all {len(identities)} blocks and leaves none to "
            f"train on; shard the data again with a smaller --rows_per_block, or give --data.validation_fraction 0 to "
            f"hold nothing out"
        )
    return chosen
