"""Rows: sentences in the order of a slow definition, and documents that fill packed rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trp_scale.sharding.text.rows import SHORTEST_PART, RowPacker, SegmentPacker, fill_rows

ROW = 10

words = st.lists(st.integers(1, 4), min_size=0, max_size=12)  # pieces of each word of a sentence
documents = st.lists(st.lists(words, max_size=6), max_size=5)


def slow_rows(sentences: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return the rows of a document as lists of (sentence, number of its pieces), one piece at a time."""
    rows: list[list[tuple[int, int]]] = [[]]
    for number, lengths in enumerate(sentences):
        starts = {sum(lengths[:index]) for index in range(len(lengths))}
        left = sum(lengths)
        if left + sum(pieces for _, pieces in rows[-1]) > ROW:
            rows.append([])
        while left > ROW:
            place = sum(lengths) - left
            cut = next((size for size in range(ROW, 0, -1) if place + size in starts), ROW)
            rows[-1].append((number, cut))
            rows.append([])
            left -= cut
        if left:
            rows[-1].append((number, left))
    return [row for row in rows if row]


@settings(max_examples=300, deadline=None)
@given(documents)
def test_rows_are_those_of_the_slow_definition(corpus: list[list[list[int]]]) -> None:
    packer = RowPacker(ROW)
    expected: list[list[tuple[int, int]]] = []
    for sentences in corpus:
        for lengths in sentences:
            starts = np.zeros(sum(lengths), dtype=bool)
            starts[np.cumsum([0, *lengths])[:-1]] = True
            packer.add_sentence(sum(lengths), starts)
        packer.end_document()
        expected += slow_rows(sentences)
    ends = [np.cumsum([pieces for _, pieces in row]).tolist() for row in expected]
    assert packer.ends == ends
    assert sum(row[-1] for row in ends) == sum(sum(lengths) for sentences in corpus for lengths in sentences)


def test_a_word_longer_than_a_row_is_cut_in_its_middle() -> None:
    packer = RowPacker(ROW)
    starts = np.zeros(25, dtype=bool)
    starts[0] = True
    packer.add_sentence(25, starts)
    packer.end_document()
    assert packer.ends == [[10], [10], [5]]


def test_rows_are_laid_out_and_padded() -> None:
    packer = RowPacker(4)
    for sentences in ([1], [1, 1, 1], [2]):
        for pieces in sentences:
            packer.add_sentence(pieces)
        packer.end_document()
    ends = packer.take(3)
    assert ends.tolist() == [[1, 1, 1], [1, 2, 3], [2, 2, 2]]
    _, text, _ = packer.places(ends)
    rows = fill_rows(np.arange(1, 7, dtype=np.uint16), text, padding=9)
    assert rows.tolist() == [[1, 9, 9, 9], [2, 3, 4, 9], [5, 6, 9, 9]]
    assert packer.ends == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 70), max_size=30), st.integers(1, 6))
def test_documents_fill_packed_rows(corpus: list[int], most: int) -> None:
    length = 24
    packer = SegmentPacker(length, most)
    for pieces in corpus:
        packer.add_sentence(pieces)
        packer.end_document()
    packer.end_row()
    parts = [np.diff([0, *ends]).tolist() for ends in packer.ends]
    assert sum(sum(row) - 2 * len(row) for row in parts) == sum(corpus)
    assert all(len(row) <= most and min(row) > 2 and sum(row) <= length for row in parts)
    for row, following in pairwise(parts):
        room = length - sum(row) - 2
        assert len(row) == most or room < min(following[0] - 2, SHORTEST_PART)
