"""How labelled sentences become a Batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from trp_scale.batch import Batch
from trp_scale.data.glue.tokens import PairTokenizer, TokenTable
from trp_scale.data.plan import Addresses

WIDTH_MULTIPLE = 8
"""Rows are padded to a multiple of this: few shapes, that fill the hardware's tiles."""


class GlueBatchBuilder:
    """Makes batches of `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`; draws nothing.

    Fields of the batch, first dimension rows:
        tokens [R, W] int64. token_types [R, W] int64: 1 on B and its [SEP]. attention_mask [R, W] bool: True on pieces.
        labels [R]: int64 numbers of labels, or float32 scores. row_weights [R] float32: 1, or 0 for a row that is not
        there, which is [CLS] alone. measured_set [R] int64: which table the row is from.

    Args:
        tables: the data sets.
        tokenizer: that made them.
        length: L, of the longest row.
        padding: batch: W is the longest row of the micro-batch, up to a multiple of 8. length: always L. What a row
            gives is the same up to rounding, and W follows from positions alone, so that a resumed run meets the same.
        scores: labels are scores.
    """

    def __init__(
        self,
        tables: Sequence[TokenTable],
        tokenizer: PairTokenizer,
        *,
        length: int,
        padding: Literal["batch", "length"],
        scores: bool,
    ) -> None:
        self._pad = tokenizer.pad
        self._length, self._padding = length, padding
        counts = [len(table.rows) for table in tables]
        sizes = [len(table.pieces) for table in tables]
        self._first_row = np.cumsum(counts) - counts  # [tables]
        self._pieces = np.concatenate([table.pieces for table in tables])
        first_piece = np.cumsum(sizes) - sizes
        self._starts = np.concatenate([t.ends[:-1] + first for t, first in zip(tables, first_piece, strict=True)])
        self._lengths = np.concatenate([table.lengths for table in tables])
        self._second = np.concatenate([table.second for table in tables])
        labels = np.concatenate([table.labels for table in tables])
        self._labels = labels.astype(np.float32) if scores else labels.astype(np.int64)

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        present = addresses.present
        row = self._first_row[addresses.member] + addresses.block  # [R]
        lengths = np.where(present, self._lengths[row], 1)  # every row begins with [CLS]
        place = np.arange(self._width(int(lengths.max())))  # [W]
        attended = place < lengths[:, None]  # [R, W]
        source = np.where(attended, self._starts[row][:, None] + place, 0)
        tokens = np.where(attended, self._pieces[source].astype(np.int64), self._pad)
        second = attended & (place >= self._second[row][:, None])
        fields = {
            "tokens": torch.from_numpy(tokens),
            "token_types": torch.from_numpy(second.astype(np.int64)),
            "attention_mask": torch.from_numpy(attended),
            "labels": torch.from_numpy(np.where(present, self._labels[row], np.zeros_like(self._labels[row]))),
            "row_weights": torch.from_numpy(present.astype(np.float32)),
            "measured_set": torch.from_numpy(addresses.member.astype(np.int64)),
        }
        return Batch(
            fields=fields,
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            fetch_seconds=time.perf_counter() - began,
        )

    def _width(self, longest: int) -> int:
        if self._padding == "length":
            return self._length
        return min(self._length, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
