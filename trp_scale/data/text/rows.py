"""Stored text rows and their partners, read for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.data.hashing import Integers
from trp_scale.data.index import failure_reason
from trp_scale.data.tar_reader import ArrayReader
from trp_scale.data.text.dataset import GROUP_BITS, GROUPS
from trp_scale.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Rows as stored; P pieces a row, S sentence ends.

    Attributes:
        tokens: [N, P] as stored, uint16 or uint32.
        tags: [N, P] uint8.
        ends: [N, S] int64, end offsets of sentences, ascending; padded with the row's number of pieces.
        pieces: [N] number of pieces, 0 for a row that is not there or cannot be read.
        own: [R] line of each address's own row in the arrays above.
        partner: [R] line of its partner.
        readable: [R] whether both could be read and hold allowed values.
        reasons: what was wrong with some blocks, by key.
    """

    tokens: npt.NDArray[Any]
    tags: npt.NDArray[np.uint8]
    ends: Integers
    pieces: Integers
    own: Integers
    partner: Integers
    readable: npt.NDArray[np.bool_]
    reasons: dict[str, str]


class TextRowReader:
    """Reads rows of several data sets.

    Args:
        readers: one per data set.
        names: their names in the mixture, put before the keys of corrupt blocks.
        row_length: P.
        token_dtype: type of stored tokens.
        vocab_size: token ids must be below it.
    """

    def __init__(
        self,
        *,
        readers: Sequence[ArrayReader],
        names: Sequence[str],
        row_length: int,
        token_dtype: str,
        vocab_size: int,
    ) -> None:
        self._readers, self._names = readers, names
        self._dtypes = (np.dtype(token_dtype), np.dtype(np.uint8), np.dtype(np.uint16))
        self._row_length, self._vocab_size = row_length, vocab_size

    def read(self, member: Integers, block: Integers, own: Integers, partner: Integers) -> TextRows:
        """Rows `own` and `partner` of each block, all [R].

        One gather per block and member file: lines come sorted by block, `TextRows.own` and `.partner` say where.
        """
        count = len(own)
        block_code = np.tile(member << 40 | block, 2)  # [2R]
        wanted = np.concatenate([own, partner])
        order = np.argsort(block_code, kind="stable")
        codes, rows = block_code[order], wanted[order]
        bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), 2 * count]
        spans = list(pairwise(bounds))
        reasons: dict[str, str] = {}
        blocks = [self._open(int(codes[first]), reasons) for first, _ in spans]
        sentences = max((opened[2].shape[1] for opened in blocks if opened is not None), default=1)

        tokens = np.zeros((2 * count, self._row_length), dtype=self._dtypes[0])
        tags = np.zeros((2 * count, self._row_length), dtype=np.uint8)
        ends = np.zeros((2 * count, sentences), dtype=np.int64)
        for (first, last), opened in zip(spans, blocks, strict=True):
            if opened is None:
                continue
            lines = rows[first:last]
            # mode: "raise" would copy through a buffer; lines are in range by the index, which `_open` compares
            opened[0].take(lines, axis=0, out=tokens[first:last], mode="clip")
            opened[1].take(lines, axis=0, out=tags[first:last], mode="clip")
            stored = opened[2][lines]  # [lines, S of this block]
            ends[first:last, : stored.shape[1]] = stored
            ends[first:last, stored.shape[1] :] = stored[:, -1:]

        good = self._check(tokens, tags, ends)
        for (first, last), opened in zip(spans, blocks, strict=True):
            if opened is None:
                good[first:last] = False
        if not good.all():
            ends[~good] = 0
            wrong = {self._key(code): "numbers that no row can have" for code in np.unique(codes[~good]).tolist()}
            reasons = wrong | reasons
        line = np.empty(2 * count, dtype=np.int64)
        line[order] = np.arange(2 * count)
        return TextRows(
            tokens=tokens,
            tags=tags,
            ends=ends,
            pieces=ends[:, -1],
            own=line[:count],
            partner=line[count:],
            readable=good[line[:count]] & good[line[count:]],
            reasons=reasons,
        )

    def _open(self, code: int, reasons: dict[str, str]) -> tuple[npt.NDArray[Any], ...] | None:
        """Arrays of a block; None where it cannot be read: the batch names it, the training loop limits them."""
        try:
            tokens, tags, sentences = self._readers[code >> 40].arrays(code & ((1 << 40) - 1))
            width = (self._row_length,)
            if tokens.shape[1:] != width or tags.shape[1:] != width or sentences.ndim != 2 or sentences.shape[1] == 0:
                raise DataError(f"arrays of {tokens.shape}, {tags.shape} and {sentences.shape}, not of rows of {width}")
            if (tokens.dtype, tags.dtype, sentences.dtype) != self._dtypes:
                raise DataError(f"{tokens.dtype}, {tags.dtype} and {sentences.dtype}, not {self._dtypes}")
        except Exception as error:  # whatever a damaged file leads to
            reasons[self._key(code)] = failure_reason(error)
            return None
        return tokens, tags, sentences

    def _check(self, tokens: npt.NDArray[Any], tags: npt.NDArray[np.uint8], ends: Integers) -> npt.NDArray[np.bool_]:
        """Return a mask [N] of the lines with allowed values: a wrong id would fault in the embedding, on a GPU for
        good."""
        groups = tags & np.uint8(GROUP_BITS)
        steps = ends[:, 1:] >= ends[:, :-1]
        good = np.ones(len(tokens), dtype=np.bool_)
        if int(tokens.max()) < self._vocab_size and int(groups.max()) < len(GROUPS) and steps.all():  # as a rule
            return good & (ends[:, -1] <= self._row_length)
        good &= tokens.max(axis=1) < self._vocab_size
        good &= groups.max(axis=1) < len(GROUPS)
        good &= steps.all(axis=1)
        return good & (ends[:, -1] <= self._row_length)

    def _key(self, code: int) -> str:
        name = self._names[code >> 40]
        key = self._readers[code >> 40].blocks.keys[code & ((1 << 40) - 1)]
        return f"{name}/{key}" if name else key
