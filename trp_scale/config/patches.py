"""The patches of a crop: how many there are, and how many of them the encoder is shown."""

from __future__ import annotations

from dataclasses import dataclass

MOST_PATCHES = 1 << 16
"""That a crop may have: masks carry a patch's number in 16 bits."""


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
        size: side of the crop in pixels (crops.size), a multiple of the patch's.
        patch_size: side of a patch (vision.patch_size).
        ratio: share that is predicted (masking.ratio).
    """
    patches = (size // patch_size) ** 2
    return PatchSplit(patches=patches, visible=int(patches * (1.0 - ratio)))
