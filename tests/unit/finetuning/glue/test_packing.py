"""Rows that share sequences: all there, none over another, in few sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trp_scale.finetuning.glue.batch import one_each, place_rows


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_every_row_has_places_of_its_own(lengths: list[int]) -> None:
    sizes = np.array(lengths)
    sequence, first, slot = place_rows(sizes, 64)
    taken = np.zeros((sequence.max() + 1, 64), dtype=np.int64)
    for row, length in enumerate(lengths):
        assert first[row] + length <= 64
        taken[sequence[row], first[row] : first[row] + length] += 1
    assert taken.max() == 1 and taken.any(axis=1).all()
    for number in range(len(taken)):
        inside = np.flatnonzero(sequence == number)
        assert sorted(slot[inside].tolist()) == list(range(len(inside)))
    # No two sequences could be one: what first fit promises.
    assert len(taken) == 1 or taken.sum() * 2 > 64 * (len(taken) - 1)


def test_short_rows_fill_their_sequences() -> None:
    lengths = np.random.default_rng(0).integers(4, 40, size=64)
    assert int(place_rows(lengths, 64).sequence.max()) + 1 <= np.ceil(lengths.sum() / 64 / 0.9)
    assert place_rows(np.full(6, 32), 64).sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert one_each(3).sequence.tolist() == [0, 1, 2] and not one_each(3).first.any()
