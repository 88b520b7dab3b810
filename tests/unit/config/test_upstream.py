"""How many patches a crop has."""

from __future__ import annotations

import pytest

from trp_scale.config import PatchSplit, split_patches


@pytest.mark.parametrize(
    ("size", "patch_size", "ratio", "patches", "visible"),
    [(224, 16, 0.75, 196, 49), (112, 16, 0.75, 49, 12), (32, 8, 0.5, 16, 8), (224, 16, 0.9, 196, 19)],
)
def test_how_many_are_visible(size: int, patch_size: int, ratio: float, patches: int, visible: int) -> None:
    assert split_patches(size, patch_size, ratio) == PatchSplit(patches=patches, visible=visible)
    assert split_patches(size, patch_size, ratio).masked == patches - visible
