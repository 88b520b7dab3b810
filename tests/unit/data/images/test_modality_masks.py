"""Visible patches over modalities: always as many, shares as Dirichlet's moments say, caps, uniform within each."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from trp_scale.data.hashing import mix
from trp_scale.pretraining.mm_mae.batch import ModalityMasks, draw_shares, share_out

WORDS = mix(np.arange(10_000, dtype=np.uint64))


def masks(visible: int = 98, concentration: float = 1.0, modalities: int = 3, patches: int = 196) -> ModalityMasks:
    return ModalityMasks(modalities=modalities, patches=patches, visible=visible, concentration=concentration)


def test_ten_thousand_draws_have_98_tokens_with_dirichlet_shares() -> None:
    visible = masks().draw(WORDS)  # [10000, 98]
    assert visible.shape == (10_000, 98) and visible.dtype == np.int64
    assert (np.diff(visible, axis=1) > 0).all() and visible.min() >= 0 and visible.max() < 588
    counts = np.stack([(visible // 196 == modality).sum(axis=1) for modality in range(3)], axis=1)
    assert (counts.sum(axis=1) == 98).all() and counts.min() == 0 and counts.max() == 98
    shares = counts / 98
    deviation = np.sqrt(1 / 18 / 10_000)  # of a mean: Dirichlet(1, 1, 1) has variance 1/18 and covariance -1/36
    assert np.abs(shares.mean(axis=0) - 1 / 3).max() < 5 * deviation
    covariance = np.cov(shares.T)
    expected = np.full((3, 3), -1 / 36) + np.eye(3) / 12
    np.testing.assert_allclose(covariance, expected, rtol=0.07)
    levels = np.array([0.1, 0.25, 0.5, 0.75, 0.9])  # each share is Beta(1, 2): quantile 1 - sqrt(1 - level)
    found = np.quantile(draw_shares(WORDS[:, None] ^ np.arange(3, dtype=np.uint64), 1.0), levels, axis=0)
    np.testing.assert_allclose(found, np.tile(1 - np.sqrt(1 - levels), (3, 1)).T, atol=0.02)


def test_every_patch_of_every_modality_is_visible_equally_often() -> None:
    visible = masks().draw(WORDS)
    shares = np.bincount(visible.ravel(), minlength=588) / 10_000
    assert np.abs(shares - 1 / 6).max() < 5 * np.sqrt(1 / 6 * 5 / 6 / 10_000)


def test_every_set_within_a_modality_is_equally_likely() -> None:
    """Given that a modality of 4 patches shows 2: all 6 pairs; chi-square, 5 degrees of freedom, 99.9 % quantile."""
    visible = masks(visible=4, modalities=2, patches=4).draw(WORDS)
    first = (visible < 4).sum(axis=1) == 2
    pairs = visible[first][:, :2]
    _, counts = np.unique(pairs[:, 0] * 4 + pairs[:, 1], return_counts=True)
    assert len(counts) == 6
    expected = len(pairs) / 6
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_modalities_and_rows_are_independent() -> None:
    """Two modalities with c and d patches have c d / 196 places in common on average, and so have two rows."""
    visible = masks().draw(WORDS)
    flags = np.zeros((10_000, 588), dtype=np.int64)
    np.put_along_axis(flags, visible, 1, axis=1)
    first, second, _ = np.moveaxis(flags.reshape(10_000, 3, 196), 1, 0)  # [10000, 196]
    for one, other in ((first, second), (first[:-1], first[1:])):
        expected = (one.sum(axis=1) * other.sum(axis=1)).sum() / 196
        assert abs((one * other).sum() / expected - 1) < 0.03


def test_a_row_does_not_depend_on_the_others() -> None:
    assert (masks().draw(WORDS[5:7]) == masks().draw(WORDS[:10])[5:7]).all()


@pytest.mark.parametrize(("visible", "modalities"), [(300, 3), (588, 3), (587, 3), (392, 2), (196, 1), (1, 3)])
def test_no_modality_shows_more_patches_than_it_has(visible: int, modalities: int) -> None:
    drawn = masks(visible=visible, modalities=modalities).draw(WORDS[:2000])
    assert drawn.shape == (2000, visible) and (np.diff(drawn, axis=1) > 0).all()
    counts = np.stack([(drawn // 196 == modality).sum(axis=1) for modality in range(modalities)], axis=1)
    assert counts.max() <= 196 and (counts.sum(axis=1) == visible).all()
    if visible == 300:
        full = counts == 196
        assert 0.2 < full.any(axis=1).mean() < 0.9 and counts.min() == 0
        deviation = counts.std(axis=0) / np.sqrt(2000)
        assert (np.abs(counts.mean(axis=0) - 100) < 5 * deviation).all()


def exact_quotas(shares: list[Fraction], total: int, most: int) -> list[Fraction]:
    """What a modality cannot take goes to the others in proportion, by the definition."""
    full: set[int] = set()
    while True:
        rest = [number for number in range(len(shares)) if number not in full]
        left = total - most * len(full)
        quotas = {n: shares[n] * left / sum(shares[m] for m in rest) for n in rest}
        over = {number for number, quota in quotas.items() if quota > most}
        if not over:
            return [quotas.get(number, Fraction(most)) for number in range(len(shares))]
        full |= over


@pytest.mark.parametrize("total", [1, 98, 300, 560])
def test_counts_are_the_quotas_rounded(total: int) -> None:
    shares = np.random.default_rng(total).dirichlet([0.5, 0.5, 0.5], 300)
    counts = share_out(shares, total, 196)
    assert (counts.sum(axis=1) == total).all()
    for row, found in zip(shares, counts.tolist(), strict=True):
        quotas = exact_quotas([Fraction(share) for share in row.tolist()], total, 196)
        fractions = [quota - quota.__floor__() for quota in quotas]
        assert all(abs(count - quota) < 1 for count, quota in zip(found, quotas, strict=True))
        raised = [f for f, quota, count in zip(fractions, quotas, found, strict=True) if count > quota]
        kept = [f for f, quota, count in zip(fractions, quotas, found, strict=True) if count <= quota]
        assert not raised or not kept or min(raised) >= max(kept) - Fraction(1, 10**9)  # the largest remainders


@pytest.mark.parametrize("concentration", [0.3, 1.0, 2.0, 25.0])
def test_other_concentrations_have_their_variance(concentration: float) -> None:
    if concentration != 1.0:
        pytest.importorskip("scipy", reason="the extra `evaluation` (scipy) is not installed")
    shares = draw_shares(WORDS[:, None] ^ np.arange(3, dtype=np.uint64), concentration)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-12)
    variance = (2 / 9) / (3 * concentration + 1)
    assert np.abs(shares.mean(axis=0) - 1 / 3).max() < 5 * np.sqrt(variance / 10_000)
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.06)


def test_a_concentration_near_zero_gives_one_modality_everything() -> None:
    pytest.importorskip("scipy", reason="the extra `evaluation` (scipy) is not installed")
    shares = draw_shares(WORDS[:, None] ^ np.arange(3, dtype=np.uint64), 1e-4)
    assert np.isfinite(shares).all() and (shares > 0).all()
    assert (shares.max(axis=1) > 0.999).mean() > 0.99
    assert (np.abs(np.bincount(shares.argmax(axis=1)) / 10_000 - 1 / 3) < 0.025).all()


def test_more_visible_patches_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="589 visible of 3 x 196 patches"):
        masks(visible=589)
