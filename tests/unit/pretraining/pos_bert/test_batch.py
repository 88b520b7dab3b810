"""Next-sentence pairs: half of them right, cut at sentence ends, partners from the same block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.unit.data.stored import draw_rows
from trp_scale.data.hashing import mix
from trp_scale.data.text.dataset import WORD_START, TextRows
from trp_scale.pretraining.pos_bert.batch import Segments, draw_pairs, draw_partners

WIDTH = 40
Flags = npt.NDArray[np.bool_]


def states(count: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    return mix(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32))


def block(rows: int, shortest: int = 1) -> tuple[TextRows, Flags]:
    """One block whose rows are paired with one another."""
    tokens, tags, ends = draw_rows(rows, WIDTH, np.random.default_rng(0), shortest)
    own = np.arange(rows)
    partner = draw_partners(states(rows), own, np.full(rows, rows))
    return stored(tokens, tags, ends, own, partner), partner == own


def stored(
    tokens: npt.NDArray[np.uint16],
    tags: npt.NDArray[np.uint8],
    ends: npt.NDArray[np.uint16],
    own: npt.NDArray[np.int64],
    partner: npt.NDArray[np.int64],
) -> TextRows:
    wide = ends.astype(np.int64)
    readable = np.ones(len(own), dtype=np.bool_)
    return TextRows(
        tokens=tokens, tags=tags, ends=wide, pieces=wide[:, -1], own=own, partner=partner, readable=readable, reasons={}
    )


def single_row(ends: list[int], starts: list[int]) -> TextRows:
    """A row on line 0 and a full partner on line 1."""
    tags = np.zeros((2, WIDTH), dtype=np.uint8)
    tags[0, starts] = WORD_START
    both = np.array([ends + [ends[-1]] * (3 - len(ends)), [10, 20, 40]], dtype=np.uint16)
    tokens = np.arange(2 * WIDTH, dtype=np.uint16).reshape(2, WIDTH)
    return stored(tokens, tags, both, np.zeros(200, dtype=np.int64), np.ones(200, dtype=np.int64))


NOBODY = np.zeros(200, dtype=np.bool_)


def test_half_of_the_pairs_are_right() -> None:
    rows, alone = block(8000)
    wrong = draw_pairs(rows, states(8000), alone).wrong
    assert abs(wrong[rows.pieces > 1].mean() - 0.5) < 0.02  # 3.6 standard deviations


def test_every_pair_is_cut_at_sentence_ends() -> None:
    rows, alone = block(1500)
    pairs = draw_pairs(rows, states(1500), alone)
    for row in range(1500):
        ends = sorted(set(rows.ends[row].tolist()))
        n, split = ends[-1], int(pairs.first_length[row])
        assert int(pairs.first_start[row]) == row * WIDTH
        if len(ends) > 1:
            assert split in ends[:-1]
        else:
            assert 1 <= split < n or n == 1
        partner = int(rows.partner[row])
        assert partner != row
        if pairs.wrong[row]:
            check_wrong(rows, pairs, row, partner)
        else:
            assert int(pairs.second_start[row]) == row * WIDTH + split
            assert split + int(pairs.second_length[row]) == n and n > 1


def check_wrong(rows: TextRows, pairs: Segments, row: int, partner: int) -> None:
    """B is the partner's longest tail of whole sentences, or the beginning of its last sentence if that is too long."""
    ends = sorted(set(rows.ends[partner].tolist()))
    start = int(pairs.second_start[row]) - partner * WIDTH
    length = int(pairs.second_length[row])
    n, split = int(rows.pieces[row]), int(pairs.first_length[row])
    room = n - split if n > 1 else WIDTH - 1
    starts = [0, *ends[:-1]]
    assert start in starts
    assert 1 <= length <= room
    if start + length < ends[-1]:
        assert start == starts[-1] and length == room
    else:
        earlier = [s for s in starts if s < start]
        assert not earlier or ends[-1] - earlier[-1] > room  # no longer tail would have fitted


def test_lengths_do_not_give_the_label_away() -> None:
    rows, alone = block(5000, shortest=WIDTH - 3)
    pairs = draw_pairs(rows, states(5000), alone)
    total = pairs.first_length + pairs.second_length
    assert (total <= rows.pieces[rows.own]).all()
    wrong = pairs.wrong == 1
    assert total[~wrong].mean() - total[wrong].mean() < 3.0  # sentences have 7 pieces on average


def test_partners_are_uniform() -> None:
    count = 40_000
    partner = draw_partners(states(count), np.full(count, 2), np.full(count, 5))
    share = np.bincount(partner, minlength=5) / count
    assert share[2] == 0
    assert np.abs(share[[0, 1, 3, 4]] - 0.25).max() < 0.01


def test_splits_are_uniform_over_sentence_ends() -> None:
    split = np.concatenate(
        [draw_pairs(single_row([5, 9, 20], [0]), states(200, seed), NOBODY).first_length for seed in range(20)]
    )
    assert set(split.tolist()) == {5, 9}
    assert abs((split == 5).mean() - 0.5) < 0.04


def test_a_single_sentence_is_split_at_the_start_of_a_word() -> None:
    split = draw_pairs(single_row([12], [0, 3, 4, 9, 15]), states(200), NOBODY).first_length
    assert set(split.tolist()) == {3, 4, 9}  # 15 is beyond the row


def test_a_single_word_is_split_anywhere() -> None:
    split = draw_pairs(single_row([4], [0]), states(200), NOBODY).first_length
    assert set(split.tolist()) == {1, 2, 3}


def test_a_single_piece_gets_a_wrong_second_part() -> None:
    pairs = draw_pairs(single_row([1], [0]), states(200), NOBODY)
    assert set(pairs.first_length.tolist()) == {1}
    assert set(pairs.wrong.tolist()) == {1}
    assert set(pairs.second_start.tolist()) == {WIDTH + 10}  # 30 pieces in whole sentences fit, 40 do not
    assert set(pairs.second_length.tolist()) == {30}


def test_a_single_row_in_a_block_gets_a_right_pair() -> None:
    everybody = ~NOBODY
    assert draw_partners(states(3), np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64)).tolist() == [0, 0, 0]
    pairs = draw_pairs(single_row([5, 20], [0]), states(200), everybody)
    assert set(pairs.wrong.tolist()) == {0}
    assert set(pairs.second_length.tolist()) == {15}
    one_piece = draw_pairs(single_row([1], [0]), states(200), everybody)
    assert set(one_piece.wrong.tolist()) == {0}
    assert set(one_piece.second_length.tolist()) == {0}


def test_a_row_without_pieces_has_empty_segments() -> None:
    pairs = draw_pairs(single_row([0], [0]), states(200), NOBODY)
    assert set(pairs.first_length.tolist()) == set(pairs.second_length.tolist()) == set(pairs.wrong.tolist()) == {0}
