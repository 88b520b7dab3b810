"""Which patches of a crop are seen and which are predicted (He et al. 2022, 3: random sampling without replacement).

Every draw is a hash of the crop's word, so a mask depends on (seed, row key, masking, crop) and on nothing else.
"""

from __future__ import annotations

import numpy as np

from trp_scale.config import MOST_PATCHES, PatchSplit
from trp_scale.data.hashing import Integers, Words, mix, name_hash

_MASK = np.uint64(name_hash("mask: patches"))
_PLACE = np.uint64(MOST_PATCHES - 1)


def draw_masks(words: Words, split: PatchSplit) -> tuple[Integers, Integers]:
    """The visible patches are those with the smallest hashes: each set of V patches is equally likely.

    Args:
        words: [R, k] a word per crop (`crops.crop_words`).
        split: N and V; at most MOST_PATCHES, which the settings' checks see to (config/images.py).

    Returns:
        visible [R, k, V] and masked [R, k, N - V], patch numbers row by row, both ascending.
    """
    order = random_order(mix(words ^ _MASK), split.patches)  # [R, k, N]
    visible, masked = np.sort(order[:, :, : split.visible], axis=2), np.sort(order[:, :, split.visible :], axis=2)
    return visible, masked


def random_order(words: Words, patches: int) -> Integers:
    """Patch numbers 0 .. patches - 1 in the order of their hashes, [..., patches] for words [...]."""
    place = np.arange(patches, dtype=np.uint64)
    order = (mix(words[..., None] ^ place) & ~_PLACE) | place
    order.sort(axis=-1)  # carries the patch's number: equal hashes keep their order
    numbers: Integers = (order & _PLACE).astype(np.int64)
    return numbers
