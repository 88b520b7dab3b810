"""Next-sentence pairs (BERT, Devlin et al. 2019, as TRP 001 D.1 uses them): where A and B of each sequence come from.

Each row is split at a sentence end into A and the rest. With probability 1/2 B is the rest (label 0, "is next" in
transformers' convention), else B comes from another row of the *same block* (label 1). Not of the shuffled group: which
blocks share a group changes from epoch to epoch. A pair is a function of (seed, row key, masking) and of the block's
content alone, so that ten static maskings really are ten.

The B of a wrong pair is the partner row's longest tail of whole sentences that is no longer than the continuation it
stands for; if even the last sentence is longer, its beginning. A right B ends where a row ends and so does a wrong one,
and their lengths are alike, so that neither the length nor a cut-off end gives the label away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.text.dataset import WORD_START, TextRows

_PARTNER = np.uint64(name_hash("pair: partner"))
_RIGHT = np.uint64(name_hash("pair: right or wrong"))
_SPLIT = np.uint64(name_hash("pair: split"))


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Pieces of A and B of each sequence, [R] each; starts are places in `TextRows.tokens` seen as one flat array.

    `wrong` is the label: 1 where B is from another row.
    """

    first_start: Integers
    first_length: Integers
    second_start: Integers
    second_length: Integers
    wrong: Integers


def draw_partners(states: Words, row: Integers, block_rows: Integers) -> Integers:
    """Another row of the same block, [R]: a cyclic distance of 1..rows-1; the row itself in a block of one."""
    distance = 1 + below(mix(states ^ _PARTNER), np.maximum(block_rows - 1, 1))
    return (row + distance) % block_rows


def whole_rows(rows: TextRows) -> Segments:
    """No pairs: A is the whole row and there is no B."""
    nothing = np.zeros_like(rows.own)
    start = rows.own * rows.tokens.shape[1]
    return Segments(
        first_start=start,
        first_length=rows.pieces[rows.own],
        second_start=nothing,
        second_length=nothing,
        wrong=nothing,
    )


def draw_pairs(rows: TextRows, states: Words, alone: npt.NDArray[np.bool_]) -> Segments:
    """Draw the pair of each row from its state; `alone` marks rows that are their own partner. All [R].

    What is left for odd rows: one of a single sentence is split at the start of a word, one of a single word anywhere;
    a single piece is A and always gets a wrong B; in a block of one row every pair is right; a single piece alone in
    its block, and a row without pieces, get an empty right B.
    """
    width = rows.tokens.shape[1]
    pieces = rows.pieces[rows.own]
    split = _draw_split(rows, pieces, mix(states ^ _SPLIT))

    wrong = below(mix(states ^ _RIGHT), 2).astype(np.bool_)
    wrong = (wrong | (pieces == 1)) & ~alone & (pieces > 0)
    room = np.where(pieces > 1, pieces - split, width - split)
    tail_start, tail_length = _tails(rows.ends[rows.partner], room)
    return Segments(
        first_start=rows.own * width,
        first_length=split,
        second_start=np.where(wrong, rows.partner * width + tail_start, rows.own * width + split),
        second_length=np.where(wrong, tail_length, pieces - split),
        wrong=wrong.astype(np.int64),
    )


def _draw_split(rows: TextRows, pieces: Integers, draws: Words) -> Integers:
    """Pieces in A, [R]: a sentence end that leaves both sides non-empty, drawn uniformly."""
    ends = rows.ends[rows.own]  # [R, S]
    inner = (ends > 0) & (ends < pieces[:, None])
    counts = inner.sum(axis=1)
    cut = _nth_true(inner, below(draws, counts))
    split = np.take_along_axis(ends, cut[:, None], axis=1)[:, 0]
    single = np.flatnonzero(counts == 0)
    if single.size:
        split[single] = _split_sentence(rows.tags[rows.own[single]], pieces[single], draws[single])
    return split


def _split_sentence(tags: npt.NDArray[np.uint8], pieces: Integers, draws: Words) -> Integers:
    """A split inside the only sentence of a row: at the start of a word, or between any pieces if there is one word."""
    column = np.arange(tags.shape[1])
    starts = ((tags & WORD_START) != 0) & (column > 0) & (column < pieces[:, None])  # [R, P]
    counts = starts.sum(axis=1)
    at_word = _nth_true(starts, below(draws, counts))
    anywhere = 1 + below(draws, np.maximum(pieces - 1, 1))
    return np.where(counts > 0, at_word, np.minimum(anywhere, pieces))


def _tails(ends: Integers, room: Integers) -> tuple[Integers, Integers]:
    """Start and length of the longest tail of whole sentences within `room`, else of the last sentence cut to it."""
    pieces = ends[:, -1]
    inner = ends < pieces[:, None]  # starts of all sentences but the first
    nowhere = np.iinfo(np.int64).max
    fitting = np.where(inner & (ends >= (pieces - room)[:, None]), ends, nowhere).min(axis=1)
    last = np.where(inner, ends, 0).max(axis=1)
    start = np.where(pieces <= room, 0, np.where(fitting == nowhere, last, fitting))
    return start, np.minimum(pieces - start, room)


def _nth_true(flags: npt.NDArray[np.bool_], nth: Integers) -> Integers:
    """Column of the nth (from 0) True of each line; 0 where there is none."""
    return np.asarray((flags.cumsum(axis=1) > nth[:, None]).argmax(axis=1), dtype=np.int64)
