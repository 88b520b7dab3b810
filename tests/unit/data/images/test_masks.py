"""Patch masks: shapes, exact counts, and that they are uniform and independent."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from trp_scale.config import PatchSplit
from trp_scale.data.hashing import Integers, Words, mix
from trp_scale.data.images.crops import crop_words
from trp_scale.data.plan import Addresses, row_states
from trp_scale.pretraining.mae.batch import draw_masks

STATES = mix(np.arange(12_000, dtype=np.uint64))


def shown(visible: Integers, patches: int) -> np.ndarray:
    """[R, k, V] patch numbers as [R, k, N] flags."""
    flags = np.zeros((*visible.shape[:2], patches), dtype=bool)
    np.put_along_axis(flags, visible, True, axis=2)
    return flags


def test_visible_and_masked_are_ascending_and_complete() -> None:
    visible, masked = draw_masks(crop_words(STATES[:200], 3), PatchSplit(patches=49, visible=12))
    assert visible.shape == (200, 3, 12) and masked.shape == (200, 3, 37)
    assert visible.dtype == masked.dtype == np.int64
    assert (np.diff(visible, axis=2) > 0).all() and (np.diff(masked, axis=2) > 0).all()
    both = np.sort(np.concatenate([visible, masked], axis=2), axis=2)
    assert (both == np.arange(49)).all()


def test_every_patch_is_visible_equally_often() -> None:
    """Each share is V / N within five deviations of a binomial over 12,000 rows."""
    visible, _ = draw_masks(crop_words(STATES, 2), PatchSplit(patches=196, visible=49))
    shares = shown(visible, 196).mean(axis=0)  # [2, 196]
    assert np.abs(shares - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / len(STATES))


def test_every_set_is_equally_likely() -> None:
    """All 20 sets of 3 among 6: chi-square with 19 degrees of freedom stays below its 99.9 % quantile."""
    visible, _ = draw_masks(crop_words(STATES, 1), PatchSplit(patches=6, visible=3))
    counts = [int((visible[:, 0] == np.array(chosen)).all(axis=1).sum()) for chosen in combinations(range(6), 3)]
    assert sum(counts) == len(STATES)
    expected = len(STATES) / 20
    assert sum((count - expected) ** 2 / expected for count in counts) < 43.8


def states_of(epoch: int, maskings: int) -> Words:
    """The states of 12,000 rows with neighbouring keys."""
    keys = np.arange(12_000)
    nowhere = np.zeros_like(keys)
    addresses = Addresses(
        member=nowhere, block=nowhere, row=keys, epoch=nowhere + epoch, keys=keys, present=nowhere == 0
    )
    return row_states(addresses, seed=0, maskings=maskings)


def test_crops_rows_and_epochs_are_independent() -> None:
    """Overlap of two independent masks of V among N: hypergeometric, mean V^2 / N."""
    first, second, tenth = (
        shown(draw_masks(crop_words(states_of(epoch, 10), 2), PatchSplit(patches=49, visible=12))[0], 49)
        for epoch in (0, 1, 10)
    )
    assert (first == tenth).all()
    mean, variance = 144 / 49, 12 * (12 / 49) * (37 / 49) * (37 / 48)
    for one, other in ((first[:, 0], first[:, 1]), (first[:-1, 0], first[1:, 0]), (first[:, 0], second[:, 0])):
        overlaps = (one & other).sum(axis=1)
        assert abs(overlaps.mean() - mean) < 5 * np.sqrt(variance / len(overlaps))
        assert abs(overlaps.var() / variance - 1) < 0.08
