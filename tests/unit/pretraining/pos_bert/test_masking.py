"""Masking statistics (TRP 4.1.1), word-wise and stratified drawing, special tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trp_scale.config import RefusedError
from trp_scale.data.hashing import mix
from trp_scale.data.text.dataset import GROUPS, OTHER, WORD_START
from trp_scale.pretraining.pos_bert.masking import Masked, TokenMasker
from trp_scale.pretraining.pos_bert.settings import PosBertMaskingConfig

LENGTH, VOCABULARY = 128, 1000
MASK, SPECIAL = 4, (0, 1, 2, 3, 4)


class Rows:
    """[CLS] A [SEP] B [SEP] and padding, with words of 1.7 pieces on average and very uneven groups."""

    def __init__(self, rows: int, seed: int = 0, shortest: int = 5) -> None:
        generator = np.random.default_rng(seed)
        place = np.arange(LENGTH)
        total = generator.integers(shortest, LENGTH + 1, rows)[:, None]
        middle = 1 + (generator.random((rows, 1)) * (total - 3)).astype(np.int64)
        self.pieces = (place > 0) & (place < total - 1) & (place != middle)
        self.tokens = np.where(self.pieces, generator.integers(5, VOCABULARY, (rows, LENGTH)), 3)
        starts = generator.random((rows, LENGTH)) < 0.6
        starts[:, 1] = True
        share = np.array([18, 25, 7, 10, 6, 9, 11, 3, 0.1, 10.9]) / 100
        group_of_word = generator.choice(len(GROUPS), (rows, LENGTH), p=share)
        word = starts.cumsum(axis=1)
        self.groups = np.take_along_axis(group_of_word, word - 1, axis=1)
        self.tags = np.where(self.pieces, self.groups | (starts * WORD_START), 0).astype(np.uint8)
        self.states = mix(np.arange(rows, dtype=np.uint64) + np.uint64(seed << 32))

    def masked(self, *, spare_other: bool = False, **settings: Any) -> Masked:
        return masker(spare_other=spare_other, **settings).mask(self.tokens, self.tags, self.pieces, self.states)


def masker(*, spare_other: bool = False, **settings: Any) -> TokenMasker:
    return TokenMasker(
        PosBertMaskingConfig(**settings),
        length=LENGTH,
        vocab_size=VOCABULARY,
        mask_id=MASK,
        special_ids=SPECIAL,
        spare_other=spare_other,
    )


def chosen(masked: Masked) -> npt.NDArray[np.bool_]:
    """[R, L] which positions are predicted."""
    flags = np.zeros(masked.tokens.shape, dtype=np.bool_)
    row, slot = np.nonzero(masked.weights)
    flags[row, masked.positions[row, slot]] = True
    return flags


VARIANTS: list[dict[str, Any]] = [
    {},
    {"unit": "word"},
    {"sampling": "stratified"},
    {"spare_other": True},
    {"unit": "word", "spare_other": True},
    {"sampling": "stratified", "spare_other": True},
    {"limit": 5},
    {"unit": "word", "limit": 5},
    {"limit": 128, "ratio": 0.9},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_invariants_of_all_kinds_of_masks(variant: dict[str, Any]) -> None:
    rows = Rows(500)
    masked = rows.masked(**variant)
    flags, used = chosen(masked), masked.weights > 0
    limit = int(variant.get("limit", 0)) or 19
    assert masked.positions.shape == masked.labels.shape == masked.groups.shape == masked.weights.shape == (500, limit)
    assert not (flags & ~rows.pieces).any()  # special tokens and padding are never chosen
    assert (flags.sum(axis=1) == used.sum(axis=1)).all()  # no position twice
    assert ((used[:, :-1] >= used[:, 1:]).all()) and (masked.positions[~used] == 0).all()
    ascending = np.diff(masked.positions, axis=1) > 0
    assert ascending[used[:, 1:]].all()
    assert (masked.tokens[~flags] == rows.tokens[~flags]).all()  # nothing else is touched
    line, slot = np.nonzero(used)
    place = masked.positions[line, slot]
    assert (masked.labels[line, slot] == rows.tokens[line, place]).all()
    assert (masked.groups[line, slot] == rows.groups[line, place]).all()
    restored = masked.tokens.copy()
    restored[line, place] = masked.labels[line, slot]
    assert (restored == rows.tokens).all()
    replaced = masked.tokens[flags]
    assert (~np.isin(replaced, [0, 1, 2, 3])).all()  # a random replacement is never a special token
    assert (masked.groups[~used] == OTHER).all()
    if variant.get("spare_other"):
        assert not (flags & (rows.groups == OTHER)).any()
    else:
        assert (flags.sum(axis=1) >= np.minimum(1, rows.pieces.sum(axis=1))).all()


@pytest.mark.parametrize("variant", [{}, {"sampling": "stratified"}], ids=str)
@pytest.mark.parametrize("spare_other", [False, True])
def test_number_of_masked_pieces_is_exact(variant: dict[str, Any], spare_other: bool) -> None:
    rows = Rows(2000)
    masked = rows.masked(spare_other=spare_other, **variant)
    available = (rows.pieces & ((rows.groups != OTHER) | (not spare_other))).sum(axis=1)
    expected = [min(19, max(1, round(0.15 * n)), n) for n in available.tolist()]
    assert masked.weights.sum(axis=1).tolist() == expected


def test_share_and_kinds() -> None:
    """15 +- 0.5 % of the pieces; 80 % [MASK], 10 % random, 10 % kept, each +- 0.5 %."""
    rows = Rows(16_000, shortest=64)
    masked = rows.masked()
    flags = chosen(masked)
    assert abs(flags.sum() / rows.pieces.sum() - 0.15) < 0.005
    seen, original = masked.tokens[flags], rows.tokens[flags]
    kept_by_chance = 0.1 / (VOCABULARY - len(SPECIAL))  # a random id may be the piece's own
    assert abs((seen == MASK).mean() - 0.8) < 0.005
    assert abs((seen == original).mean() - 0.1 - kept_by_chance) < 0.005
    assert abs(((seen != MASK) & (seen != original)).mean() - 0.1 + kept_by_chance) < 0.005


def test_random_replacements_are_uniform_over_ordinary_ids() -> None:
    rows = Rows(16_000, shortest=64)
    masked = rows.masked()
    flags = chosen(masked)
    seen = masked.tokens[flags]
    random = seen[(seen != MASK) & (seen != rows.tokens[flags])]
    counts = np.bincount(random, minlength=VOCABULARY)
    assert counts[list(SPECIAL)].tolist() == [0] * 5
    ordinary = counts[5:]
    statistic = ((ordinary - ordinary.mean()) ** 2 / ordinary.mean()).sum()
    assert abs(statistic - 994) < 4 * np.sqrt(2 * 994)  # chi-square with 994 degrees of freedom


@pytest.mark.parametrize("sampling", ["uniform", "stratified"])
def test_every_piece_has_the_same_chance(sampling: str) -> None:
    """One sequence, many states: each of its n pieces is chosen with probability k / n."""
    one = Rows(1, seed=3, shortest=100)
    repeats = 20_000
    tokens, tags, pieces = (np.repeat(array, repeats, axis=0) for array in (one.tokens, one.tags, one.pieces))
    masked = masker(sampling=sampling).mask(tokens, tags, pieces, mix(np.arange(repeats, dtype=np.uint64)))
    n = int(one.pieces.sum())
    expected = round(0.15 * n) / n
    share = chosen(masked).mean(axis=0)[one.pieces[0]]
    assert np.abs(share - expected).max() < 4.5 * np.sqrt(expected * (1 - expected) / repeats)


def test_stratified_keeps_the_mean_and_lowers_the_variance() -> None:
    """Of the number of masked pieces of each group in a batch of 64: same mean, less variance, for every group."""
    one = Rows(64, seed=5, shortest=100)
    counts = {}
    for sampling in ("uniform", "stratified"):
        drawn = []
        for draw in range(300):
            states = mix(one.states + np.uint64(draw << 20))
            masked = masker(sampling=sampling).mask(one.tokens, one.tags, one.pieces, states)
            drawn.append(np.bincount(masked.groups[masked.weights > 0], minlength=len(GROUPS)))
        counts[sampling] = np.array(drawn)  # [draws, groups]
    present = np.bincount(one.groups[one.pieces], minlength=len(GROUPS)) > 30
    assert present.sum() >= 9
    uniform, stratified = counts["uniform"], counts["stratified"]
    error = np.sqrt((uniform.var(axis=0) + stratified.var(axis=0)) / 300)
    assert (np.abs(uniform.mean(axis=0) - stratified.mean(axis=0)) < 4.5 * error + 1e-9).all()
    ratio = stratified.var(axis=0)[present] / uniform.var(axis=0)[present]
    assert (ratio < 0.75).all(), ratio
    assert ratio.mean() < 0.35


def test_words_are_masked_whole() -> None:
    rows = Rows(3000)
    masked = rows.masked(unit="word")
    flags = chosen(masked)
    before = np.zeros_like(rows.pieces)
    before[:, 1:] = rows.pieces[:, :-1]
    first = rows.pieces & (((rows.tags & WORD_START) != 0) | ~before)
    word = first.cumsum(axis=1)
    for row in range(len(flags)):
        for number in np.unique(word[row][flags[row]]):
            assert flags[row][(word[row] == number) & rows.pieces[row]].all()
    wanted = np.minimum(19, np.maximum(1, np.rint(0.15 * rows.pieces.sum(axis=1))))
    longer = flags.sum(axis=1) - wanted
    assert (flags.sum(axis=1) <= 19).all()
    assert longer.max() > 0 and longer.mean() < 1.0


def test_a_word_that_would_exceed_the_limit_is_left_out() -> None:
    """Words of 4 pieces and a limit of 6: one word, never a part of the second; of 8: cut, as it is the first."""
    for size, limit, expected in ((4, 6, 4), (8, 6, 6), (3, 6, 6)):
        pieces = np.zeros((50, LENGTH), dtype=np.bool_)
        pieces[:, 1:97] = True
        tags = np.zeros((50, LENGTH), dtype=np.uint8)
        tags[:, 1:97:size] = WORD_START
        tokens = np.full((50, LENGTH), 9)
        masked = masker(unit="word", limit=limit).mask(tokens, tags, pieces, mix(np.arange(50, dtype=np.uint64)))
        assert masked.weights.sum(axis=1).tolist() == [float(expected)] * 50
        positions = masked.positions[:, :expected] - 1
        assert (positions // size == positions[:, :1] // size).all() or size == 3


def test_rows_without_pieces_have_no_elements() -> None:
    nothing = np.zeros((3, LENGTH), dtype=np.bool_)
    variants: list[dict[str, Any]] = [{}, {"unit": "word"}, {"sampling": "stratified"}]
    for settings in variants:
        masked = masker(**settings).mask(
            np.full((3, LENGTH), 3), nothing.astype(np.uint8), nothing, mix(np.arange(3, dtype=np.uint64))
        )
        assert masked.weights.sum() == 0
        assert (masked.tokens == 3).all()


def test_a_row_depends_on_its_own_state_only() -> None:
    rows = Rows(64)
    whole = rows.masked()
    part = masker().mask(rows.tokens[10:20], rows.tags[10:20], rows.pieces[10:20], rows.states[10:20])
    assert (whole.tokens[10:20] == part.tokens).all()
    assert (whole.positions[10:20] == part.positions).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 129}, r"masking\.limit"),
        ({"unit": "word", "sampling": "stratified"}, r"--masking\.sampling uniform"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        masker(**settings)
