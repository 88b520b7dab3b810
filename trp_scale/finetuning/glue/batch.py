"""Batches of labelled sentences: tokens of a whole file, and packing of short rows into shared sequences."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.plan import Addresses
from trp_scale.data.text.tokenizer import check_encoding, open_tokenizer, vocabulary_size
from trp_scale.finetuning.glue.folders import Examples

TOKENIZER_BATCH = 4096
"""Number of examples that are tokenized at once: the tokenizer's `Encoding` of an example is large."""


@dataclass(frozen=True, kw_only=True)
class PairTokenizer:
    """Tokenizer for `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`.

    Attributes:
        backend: of the tokenizers library, with truncation of the longer sentence first.
        pad: id of [PAD].
        vocabulary: largest id + 1.
    """

    backend: Tokenizer
    pad: int
    vocabulary: int


def load_tokenizer(directory: Path, *, length: int, has_types: bool = True) -> PairTokenizer:
    """Load a Hugging Face tokenizer directory (tokenizer.json, or BERT's vocab.txt). `has_types`: the encoder reads
    token types.

    Raises:
        RefusedError: the directory does not exist, or has no BERT tokenizer.
    """
    tokenizer = open_tokenizer(directory, flag="--downstream.tokenizer")
    if not getattr(tokenizer, "is_fast", False) or None in (
        tokenizer.pad_token_id,
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
    ):
        raise RefusedError(
            f"{directory}: {type(tokenizer).__name__} found; allowed: a fast tokenizer (tokenizer.json or vocab.txt) "
            "with [CLS], [SEP] and [PAD], as BERT's"
        )
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(length, strategy="longest_first")
    backend.encode_special_tokens = True  # "[MASK]" in text is text, as in pre-training
    probe = check_encoding(backend, directory)
    ends = (probe.ids[0], probe.ids[-1], probe.type_ids[-1] if has_types else 1)
    if ends != (tokenizer.cls_token_id, tokenizer.sep_token_id, 1):
        raise RefusedError(
            f"{directory}: a pair becomes {' '.join(probe.tokens)}; allowed: a tokenizer that returns [CLS] A [SEP] B "
            "[SEP] with token types 0 and 1, as BERT's"
        )
    return PairTokenizer(backend=backend, pad=tokenizer.pad_token_id, vocabulary=vocabulary_size(backend))


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Tokens of examples; each example is a block of one row (data/plan.py), so single rows are shuffled.

    Attributes:
        keys, identities, rows: as `plan.Blocks`.
        pieces: [total] concatenated token ids of all rows.
        ends: [n + 1] offsets of the rows in `pieces`.
        second: [n] position in the row of its second sentence; the row's length for a single sentence.
        labels: [n] float64.
    """

    keys: list[str]
    identities: Words
    rows: Integers
    pieces: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    ends: Integers
    second: Integers
    labels: npt.NDArray[np.float64]

    @property
    def lengths(self) -> Integers:
        """Number of tokens of each row, [n]."""
        return np.diff(self.ends)

    def digest(self) -> str:
        """Return a hash of tokens and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.identities, self.pieces, self.ends, self.second, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()


def tokenize(examples: Examples, tokenizer: PairTokenizer) -> TokenTable:
    """Tokenize all examples; missing labels become 0."""
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    texts = iter(zip(*examples.sentences, strict=True)) if len(examples.sentences) > 1 else iter(examples.sentences[0])
    pieces, lengths, second = [], [], []
    while part := list(islice(texts, TOKENIZER_BATCH)):
        encodings = tokenizer.backend.encode_batch_fast(part)
        pieces.append(np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), dtype=dtype))
        lengths += [len(encoding.ids) for encoding in encodings]
        second += [len(encoding.ids) - sum(encoding.type_ids) for encoding in encodings]
    keys = [f"{examples.name}/{line}" for line in examples.line_numbers]
    return TokenTable(
        keys=keys,
        identities=np.array([name_hash(key) for key in keys], dtype=np.uint64),
        rows=np.ones(len(keys), dtype=np.int64),
        pieces=np.concatenate(pieces),
        ends=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        second=np.array(second, dtype=np.int64),
        labels=np.zeros(len(keys)) if examples.labels is None else examples.labels,
    )


class PackedRows(NamedTuple):
    """Location of each row: its sequence, its first position there, and its index among the sequence's rows; [R]."""

    sequence: Integers
    first: Integers
    slot: Integers


def pack_rows(lengths: Integers, width: int) -> PackedRows:
    """Pack rows into sequences of `width` positions by first-fit decreasing.

    32 rows of SST-2 fill 93 % of packed sequences, and 33 % if padded to the longest row; for the longer rows of MRPC
    82 % and 65 %.

    Args:
        lengths: [R], each at most `width`.
    """
    used: list[int] = []
    counts: list[int] = []
    positions = np.empty((3, len(lengths)), dtype=np.int64)
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        sequence = next((number for number, used_width in enumerate(used) if used_width + length <= width), len(used))
        if sequence == len(used):
            used.append(0)
            counts.append(0)
        positions[:, row] = sequence, used[sequence], counts[sequence]
        used[sequence] += length
        counts[sequence] += 1
    return PackedRows(*positions)


WIDTH_MULTIPLE = 64
"""Packed sequences have a width that is a multiple of this: few shapes, which fit the GPU's tiles."""


class GlueBatchBuilder(BatchBuilder):
    """Builds batches of rows `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, without random numbers.

    Fields of the batch: R rows are packed into Q sequences of W positions, at most S rows in a sequence.
        tokens [Q, W] int64.
        token_types [Q, W] int64: 1 for B and its [SEP].
        positions [Q, W] int64: position of a token in its row.
        row_ids [Q, W] int64: row of the token, or -1 for padding.
        first_positions [Q, S] int64: first position of each row of a sequence; unused slots are 0.
        slots [R] int64: index of the row in the flattened first_positions.
        labels [R]: int64 numbers of labels, or float32 scores.
        row_weights [R] float32: 1; 0 for a padding row, which is [CLS] alone.
        measured_set [R] int64: number of the row's table.

    Args:
        tables: data sets.
        tokenizer: of the tables.
        length: L, largest length of a row.
        padding: none: packed sequences, as wide as the longest row rounded up to a multiple of 64, at most L. length:
            one row of L positions per sequence. Outputs are equal up to rounding. Packing depends only on the rows of
            the micro-batch, so a resumed run repeats it.
        scores: labels are scores.
    """

    def __init__(
        self,
        tables: Sequence[TokenTable],
        tokenizer: PairTokenizer,
        *,
        length: int,
        padding: Literal["none", "length"],
        scores: bool,
    ) -> None:
        self._pad = tokenizer.pad
        self._length, self._padding = length, padding
        counts = np.array([len(table.rows) for table in tables])
        sizes = np.array([len(table.pieces) for table in tables])
        self._first_row = np.cumsum(counts) - counts  # [tables]
        self._pieces = np.concatenate([table.pieces for table in tables])
        first_piece = np.cumsum(sizes) - sizes
        self._starts = np.concatenate([t.ends[:-1] + first for t, first in zip(tables, first_piece, strict=True)])
        self._lengths = np.concatenate([table.lengths for table in tables])
        self._second = np.concatenate([table.second for table in tables])
        labels = np.concatenate([table.labels for table in tables])
        self._labels = labels.astype(np.float32) if scores else labels.astype(np.int64)

    def build(self, addresses: Addresses, start: int) -> Batch:
        began = time.perf_counter()
        present = addresses.present
        stored = self._first_row[addresses.member] + addresses.block  # [R]
        lengths = np.where(present, self._lengths[stored], 1)  # every row begins with [CLS]
        fields = self._pack(stored, lengths)
        labels = self._labels[stored]
        fields |= {
            "labels": torch.from_numpy(np.where(present, labels, np.zeros_like(labels))),
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

    def _pack(self, stored: Integers, lengths: Integers) -> dict[str, Tensor]:
        """Pack `lengths` tokens of each stored row into sequences; returns the sequences' fields."""
        width, zeros = self._length, np.zeros_like(lengths)
        packed = PackedRows(np.arange(len(lengths)), zeros, zeros)  # each in a sequence of its own
        if self._padding == "none":
            width = min(width, -(-int(lengths.max()) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
            packed = pack_rows(lengths, width)
        sequences, slots = int(packed.sequence.max()) + 1, int(packed.slot.max()) + 1
        row = np.repeat(np.arange(len(lengths)), lengths)  # [tokens of all rows]
        within = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = packed.sequence[row] * width + packed.first[row] + within

        def spread(values: Integers, elsewhere: int = 0) -> Tensor:
            flat = np.full(sequences * width, elsewhere, dtype=np.int64)
            flat[at] = values
            return torch.from_numpy(flat.reshape(sequences, width))  # [Q, W]

        first_positions = np.zeros((sequences, slots), dtype=np.int64)
        first_positions[packed.sequence, packed.slot] = packed.first
        return {
            "tokens": spread(self._pieces[self._starts[stored][row] + within].astype(np.int64), self._pad),
            "token_types": spread((within >= self._second[stored][row]).astype(np.int64)),
            "positions": spread(within),
            "row_ids": spread(row, -1),
            "first_positions": torch.from_numpy(first_positions),
            "slots": torch.from_numpy(packed.sequence * slots + packed.slot),
        }
