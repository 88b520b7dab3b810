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
        split: N and V; at most MOST_PATCHES, which the settings' checks see to (recipes/vision_checks.py).

    Returns:
        visible [R, k, V] and masked [R, k, N - V], patch numbers row by row, both ascending.
    """
    place = np.arange(split.patches, dtype=np.uint64)
    hashes = mix(mix(words ^ _MASK)[:, :, None] ^ place)  # [R, k, N]
    order = (hashes & ~_PLACE) | place
    order.sort(axis=2)  # carries the patch's number: equal hashes keep their order
    order &= _PLACE
    visible, masked = order[:, :, : split.visible].astype(np.int64), order[:, :, split.visible :].astype(np.int64)
    visible.sort(axis=2)
    masked.sort(axis=2)
    return visible, masked
