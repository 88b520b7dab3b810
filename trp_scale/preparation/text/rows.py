"""Sentences into rows: consecutive sentences of one document, at most `row_length` pieces, nothing left out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowPacker:
    """Decides where rows begin and end.

    Pieces stay in one flat stream; a row is the next `length` pieces of it. A sentence goes into the open row if it
    fits, else it opens a new one; one longer than a row opens a row, is cut at the last word start that fits (in the
    middle of a word where no word starts), and what is left stays open for the sentences after it.

    Attributes:
        lengths: pieces of each finished row.
        sentence_ends: for each finished row, the end (exclusive) of each of its sentences, in pieces.
    """

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length
        self.lengths: list[int] = []
        self.sentence_ends: list[list[int]] = []
        self._open: list[int] = []

    def add_sentence(self, length: int, word_starts: NDArray[np.bool_] | None = None) -> None:
        """Place a sentence of `length` pieces.

        Args:
            length: number of pieces; a sentence without any is left out.
            word_starts: [length], whether each piece begins a word; needed if the sentence is longer than a row.
        """
        if length == 0:
            return
        filled = self._open[-1] if self._open else 0
        if filled + length > self.row_length:
            self.end_document()
            filled = 0
        start = 0
        while length - start > self.row_length:
            limit = start + self.row_length  # the row may end just before the piece at `limit`
            end = limit
            if word_starts is not None and word_starts[start + 1 : limit + 1].any():
                end = start + 1 + int(np.flatnonzero(word_starts[start + 1 : limit + 1])[-1])
            self._open.append(end - start)
            self.end_document()
            start = end
        self._open.append(filled + length - start)

    def end_document(self) -> None:
        """Finish the open row."""
        if self._open:
            self.lengths.append(self._open[-1])
            self.sentence_ends.append(self._open)
            self._open = []

    def take(self, rows: int) -> tuple[NDArray[np.int64], list[list[int]]]:
        """Remove the first `rows` finished rows and return their lengths [rows] and sentence ends."""
        lengths = np.asarray(self.lengths[:rows], dtype=np.int64)
        ends = self.sentence_ends[:rows]
        del self.lengths[:rows], self.sentence_ends[:rows]
        return lengths, ends


def fill_rows(
    values: NDArray[np.generic], lengths: NDArray[np.int64], row_length: int, padding: int
) -> NDArray[np.generic]:
    """Lay a flat stream out in rows.

    Args:
        values: [sum(lengths)], the rows one after another.
        lengths: [R].

    Returns:
        [R, row_length], padded on the right.
    """
    rows = np.full((len(lengths), row_length), padding, dtype=values.dtype)  # [R, row_length]
    rows[np.arange(row_length) < lengths[:, None]] = values
    return rows


def pad_sentence_ends(ends: list[list[int]]) -> NDArray[np.uint16]:
    """[R, S] uint16, S the largest number of sentences; padded by repeating the last end, which is the row's length."""
    width = max(len(row) for row in ends)
    return np.asarray([row + [row[-1]] * (width - len(row)) for row in ends], dtype=np.uint16)  # [R, S]
