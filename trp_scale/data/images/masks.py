"""Which patches of a crop are seen and which are predicted (He et al. 2022, 3: random sampling without replacement).

Every draw is a hash of the crop's word, so a mask depends on (seed, row key, masking, crop) and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers, Words, mix, name_hash

_MASK = np.uint64(name_hash("mask: patches"))
_PLACE = np.uint64(0xFFFF)


@dataclass(frozen=True, kw_only=True)
class PatchSplit:
    """How many patches a crop has.

    Attributes:
        patches: N, all of them.
        visible: V = int(N (1 - ratio)), those that the encoder is shown.
    """

    patches: int
    visible: int

    @property
    def masked(self) -> int:
        """M = N - V, those that are predicted."""
        return self.patches - self.visible


def split_patches(size: int, patch_size: int, ratio: float) -> PatchSplit:
    """The patches of a crop.

    Args:
        size: side of the crop in pixels (crops.size).
        patch_size: side of a patch (vision.patch_size).
        ratio: share that is predicted (masking.ratio).

    Raises:
        RefusedError: patches that do not fill the crop, more than 65,536 of them, or none visible or none masked.
    """
    if patch_size < 1 or size % patch_size:
        raise RefusedError(
            f"vision.patch_size: {patch_size} found, a divisor of crops.size = {size} allowed: patches fill the crop"
        )
    patches = (size // patch_size) ** 2
    visible = int(patches * (1.0 - ratio))
    if patches > int(_PLACE) + 1:
        raise RefusedError(f"{patches} patches of a crop, at most {int(_PLACE) + 1} allowed; raise --vision.patch_size")
    if not 0 < visible < patches:
        raise RefusedError(
            f"masking.ratio: {ratio} found, which leaves {visible} of {patches} patches visible; "
            f"1 to {patches - 1} allowed"
        )
    return PatchSplit(patches=patches, visible=visible)


def draw_masks(words: Words, split: PatchSplit) -> tuple[Integers, Integers]:
    """The visible patches are those with the smallest hashes: each set of V patches is equally likely.

    Args:
        words: [R, k] a word per crop (`crops.crop_words`).
        split: N and V.

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
