"""Splits by hashes of block keys: held-out blocks, and D_val among the training blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Words, mix, name_hash

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
