"""Rows: consecutive sentences of one document, at most row_length pieces, nothing lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trp_scale.sharding.text.portion import RowPacker, fill_rows, pad_sentence_ends

ROW = 10

words = st.lists(st.integers(1, 4), min_size=0, max_size=12)  # pieces of each word of a sentence
documents = st.lists(st.lists(words, max_size=6), max_size=5)


def slow_rows(sentences: list[list[int]]) -> list[list[tuple[int, int]]]:
    """The rows of a document as lists of (sentence, pieces of it), one piece at a time."""
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
    assert packer.sentence_ends == ends
    assert packer.lengths == [row[-1] for row in ends]
    assert sum(packer.lengths) == sum(sum(lengths) for sentences in corpus for lengths in sentences)


def test_a_word_longer_than_a_row_is_cut_in_its_middle() -> None:
    packer = RowPacker(ROW)
    starts = np.zeros(25, dtype=bool)
    starts[0] = True
    packer.add_sentence(25, starts)
    packer.end_document()
    assert packer.lengths == [10, 10, 5]


def test_rows_are_laid_out_and_padded() -> None:
    values = np.arange(1, 7, dtype=np.uint16)
    rows = fill_rows(values, np.array([1, 3, 2]), 4, padding=9)
    assert rows.tolist() == [[1, 9, 9, 9], [2, 3, 4, 9], [5, 6, 9, 9]]
    assert pad_sentence_ends([[1], [1, 2, 3], [2]]).tolist() == [[1, 1, 1], [1, 2, 3], [2, 2, 2]]
