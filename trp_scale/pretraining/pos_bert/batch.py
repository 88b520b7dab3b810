"""Batches of text: draw sentence pairs, lay out the sequences, mask them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.sources import Rows, require_kind
from trp_scale.data.text.dataset import (
    WORD_START,
    Flags,
    TextDataset,
    TextMeta,
    TextRowReader,
    TextRows,
    agree,
    open_text_dataset,
    segment_places,
)
from trp_scale.pretraining.pos_bert.masking import Masked, TokenMasker
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.tasks import source_field

_PARTNER = np.uint64(name_hash("pair: partner"))
_RIGHT = np.uint64(name_hash("pair: right or wrong"))
_SPLIT = np.uint64(name_hash("pair: split"))


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Segments A and B of each sequence, [R] each; starts are indices in the flattened `TextRows.tokens`.

    `wrong` is the label: 1 if B is from another row.
    """

    first_start: Integers
    first_length: Integers
    second_start: Integers
    second_length: Integers
    wrong: Integers


def draw_partners(states: Words, row: Integers, block_rows: Integers) -> Integers:
    """Draw another row of the same block, [R], at a cyclic distance of 1..rows-1; the row itself in a block of one."""
    distance = 1 + below(mix(states ^ _PARTNER), np.maximum(block_rows - 1, 1))
    return (row + distance) % block_rows


def whole_rows(rows: TextRows) -> Segments:
    """Return segments without pairs: A is the whole row, B is empty."""
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
    """Draw the next-sentence pair of each row from its state (BERT, Devlin et al. 2019; TRP 001 D.1).

    Each row is split at a sentence end into A and the rest. With probability 1/2, B is the rest (label 0, "is next" in
    transformers). Otherwise B is from another row of the same block (label 1). It is not from the shuffled group,
    because the blocks of a group change each epoch. A pair depends only on (seed, row key, masking) and the block's
    content, so ten static maskings give exactly ten pairs.

    A wrong B is the partner row's longest tail of whole sentences that is at most as long as the rest; if even the last
    sentence is longer, its beginning. Both kinds of B have similar lengths and end where a row ends, so neither length
    nor a cut end reveals the label.

    Special rows: a single sentence is split at the start of a word, a single word anywhere. A single piece is A and
    always gets a wrong B. In a block of one row every pair is right. A single piece alone in its block, and an empty
    row, get an empty right B. `alone` [R] marks rows that are their own partner.
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
    """Draw the number of pieces in A, [R]: a uniform sentence end that leaves both sides non-empty."""
    ends = rows.ends[rows.own]  # [R, S]
    inner = (ends > 0) & (ends < pieces[:, None])
    counts = inner.sum(axis=1)
    cut = _nth_true(inner, below(draws, counts))
    split = np.take_along_axis(ends, cut[:, None], axis=1)[:, 0]
    single = np.flatnonzero(counts == 0)
    if single.size:
        # Inside the only sentence of a row, at the start of a word, or anywhere in a single word
        tags, pieces, draws = rows.tags[rows.own[single]], pieces[single], draws[single]
        column = np.arange(tags.shape[1])
        starts = ((tags & WORD_START) != 0) & (column > 0) & (column < pieces[:, None])  # [R, P]
        counts = starts.sum(axis=1)
        at_word = _nth_true(starts, below(draws, counts))
        anywhere = 1 + below(draws, np.maximum(pieces - 1, 1))
        split[single] = np.where(counts > 0, at_word, np.minimum(anywhere, pieces))
    return split


def _tails(ends: Integers, room: Integers) -> tuple[Integers, Integers]:
    """Return start and length of the longest tail of whole sentences within `room`, else of the cut last sentence."""
    pieces = ends[:, -1]
    inner = ends < pieces[:, None]  # starts of all sentences except the first
    nowhere = np.iinfo(np.int64).max
    fitting = np.where(inner & (ends >= (pieces - room)[:, None]), ends, nowhere).min(axis=1)
    last = np.where(inner, ends, 0).max(axis=1)
    start = np.where(pieces <= room, 0, np.where(fitting == nowhere, last, fitting))
    return start, np.minimum(pieces - start, room)


def _nth_true(flags: npt.NDArray[np.bool_], nth: Integers) -> Integers:
    """Return the column of the nth (from 0) True in each line; 0 without one."""
    return np.asarray((flags.cumsum(axis=1) > nth[:, None]).argmax(axis=1), dtype=np.int64)


class TextBatchBuilder(BatchBuilder):
    """Builds batches of `[CLS] A [SEP] B [SEP]`, padded to the data set's length L, or of packed rows, with M masked
    slots.

    Fields of the batch:
        tokens [R, L] int64: ids after masking. token_types [R, L] int64: 1 on B and its [SEP].
        attention_mask [R, L] bool: True up to the last [SEP]. Absent without padding, except in compiled runs, where
            a mask that comes and goes would need two graphs per block.
        kept [K] int64: computed positions of the R * L (`kept_positions`); absent with the mask.
        masked_positions [R, M] int64: ascending; unused slots are 0. labels [R, M] int64: original ids.
        label_groups [R, M] int64: group number 0..9. label_weights [R, M] float32: 1, or 0 in unused slots.
        next_sentence [R] int64: 0 = B follows A, 1 = B is from elsewhere (all 0 if objective.next_sentence is off).
        row_weights [R] float32: 1, or 0 for a row that is absent or unreadable, which is [CLS] [SEP] [SEP], or empty.
        segment_ends [R, S] int64: ends of the segments of packed rows, padded with the last one; replaces
            attention_mask and kept.

    All draws come from (training.seed, row key, epoch modulo masking.maskings).
    """

    def __init__(self, config: PosBertConfig, datasets: list[TextDataset], meta: TextMeta) -> None:
        special = meta.special_tokens
        self._pad, self._cls, self._sep = special["pad"], special["cls"], special["sep"]
        self._length, self._segments = meta.length, meta.segments
        self._pairs = config.objective.next_sentence != "off"
        self._maskings = config.masking.maskings
        self._config = config
        self._seed = config.training.seed
        self._captured = config.training.capture == "on"
        self._always_masked = self._captured or config.training.compile in ("blocks", "whole")
        self._block_rows = [dataset.blocks.rows for dataset in datasets]
        self._reader = TextRowReader(datasets, meta, verify=config.data.verify)
        self._masker = TokenMasker(
            config.masking,
            length=meta.length,
            vocab_size=meta.vocab_size,
            mask_id=special["mask"],
            special_ids=meta.special_token_ids,
            spare_other=config.objective.other == "unmasked",
        )
        self.limit = self._masker.limit

    def build(self, addresses: Addresses, start: int) -> Batch:
        """Build the batch of the rows at `addresses`; the first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=self._maskings)
        rows, segments = self._read(addresses, states)
        lay_out = self._lay_out_packed if self._segments else self._lay_out
        tokens, tags, token_types, pieces, attended = lay_out(rows, segments)
        masked = self._masker.mask(tokens, tags, pieces, states)
        present = addresses.present & rows.readable
        fields = _fields(masked, token_types, attended, segments, present) | source_field(self._config, addresses)
        if self._segments:
            del fields["attention_mask"]
            ends = rows.ends[rows.own]  # [R, S of the blocks]
            ends = np.pad(ends, ((0, 0), (0, self._segments - ends.shape[1])), mode="edge")  # [R, S]
            fields["segment_ends"] = torch.from_numpy(ends)
        elif attended.all() and not self._always_masked:
            del fields["attention_mask"]
        else:
            lengths = kept_lengths(attended.size) if self._captured else None
            fields["kept"] = torch.from_numpy(kept_positions(attended, lengths))
        return Batch(
            fields=fields,
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            corrupt=sorted(rows.reasons),
            reasons=rows.reasons,
            fetch_seconds=time.perf_counter() - began,
        )

    def _read(self, addresses: Addresses, states: Words) -> tuple[TextRows, Segments]:
        partner = addresses.row
        if self._pairs:
            block_rows = np.empty_like(addresses.row)
            for member, rows_of_blocks in enumerate(self._block_rows):
                chosen = addresses.member == member
                block_rows[chosen] = rows_of_blocks[addresses.block[chosen]]
            partner = draw_partners(states, addresses.row, block_rows)
        rows = self._reader.read(addresses.member, addresses.block, addresses.row, partner)
        empty = ~(addresses.present & rows.readable)
        if empty.any():
            rows.ends[rows.own[empty]] = 0  # `pieces` is a view of `ends`
        alone = partner == addresses.row
        return rows, draw_pairs(rows, states, alone) if self._pairs else whole_rows(rows)

    def _lay_out(
        self, rows: TextRows, segments: Segments
    ) -> tuple[Integers, npt.NDArray[np.uint8], Integers, Flags, Flags]:
        """Return tokens, tags, token types, flags of real pieces, and the attention mask, each [R, L]."""
        column = np.arange(self._length)
        first_stop = 1 + segments.first_length[:, None]  # [R, 1] index of the first [SEP]
        second_stop = first_stop + 1 + segments.second_length[:, None]  # index of the second [SEP]
        if not self._pairs:
            second_stop = first_stop
        in_first = (column >= 1) & (column < first_stop)  # [R, L]
        in_second = (column > first_stop) & (column < second_stop)
        pieces = in_first | in_second
        first_shift = segments.first_start - 1  # [R] from an index in the sequence to one in the flat rows
        second_shift = segments.second_start - segments.first_length - 2
        source = column + first_shift[:, None] + in_second * (second_shift - first_shift)[:, None]  # [R, L]
        source *= pieces  # several times faster than np.where
        tokens = rows.tokens.ravel()[source].astype(np.int64)
        tokens[~pieces] = self._pad
        line = np.arange(len(tokens))
        tokens[:, 0] = self._cls
        tokens[line, first_stop[:, 0]] = self._sep
        tokens[line, second_stop[:, 0]] = self._sep
        tags = rows.tags.ravel()[source]
        attended = column <= second_stop
        token_types = ((column > first_stop) & attended).astype(np.int64)
        return tokens, tags, token_types, pieces, attended

    def _lay_out_packed(
        self, rows: TextRows, segments: Segments
    ) -> tuple[Integers, npt.NDArray[np.uint8], Integers, Flags, Flags]:
        """Return what `_lay_out` returns, of packed rows as they are stored."""
        first, pieces, last = segment_places(rows.ends[rows.own], self._length)
        attended = first | pieces | last
        tokens = rows.tokens[rows.own].astype(np.int64)
        tokens[~attended] = self._pad
        return tokens, rows.tags[rows.own], np.zeros_like(tokens), pieces, attended


def _fields(
    masked: Masked, token_types: Integers, attended: Flags, segments: Segments, present: Flags
) -> dict[str, torch.Tensor]:
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "tokens": masked.tokens,
        "token_types": token_types,
        "attention_mask": attended,
        "masked_positions": masked.positions,
        "labels": masked.labels,
        "label_groups": masked.groups,
        "label_weights": masked.weights,
        "next_sentence": segments.wrong,
        "row_weights": present.astype(np.float32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


KEPT_LENGTHS = 64
"""Number of different lengths of `kept`: the GPU allocator reuses memory only for tensor sizes that occurred before."""


def kept_lengths(positions: int) -> list[int]:
    """Return the eight lengths of `kept` in a captured run, ascending: from 9/16 of the positions to all."""
    return [-(-positions * part // 16) for part in range(9, 17)]


def kept_positions(attended: Flags, lengths: Sequence[int] | None = None) -> Integers:
    """Return the positions of flattened rows [R, L] that are computed, ascending: all real ones, and the first padding
    positions up to the next of `lengths`; None: up to the next multiple of R * L / KEPT_LENGTHS."""
    real = attended.ravel()
    if lengths is None:
        part = -(-real.size // KEPT_LENGTHS)
        spare = -int(real.sum()) % part
    else:
        number = int(real.sum())
        spare = next(length for length in lengths if length >= number) - number
    return np.flatnonzero(real | (np.cumsum(~real) <= spare))


def keep_all_positions(batch: Batch) -> Batch:
    """Return the batch with all positions computed; those of packed rows are."""
    if "segment_ends" in batch.fields:
        return batch
    tokens = batch["tokens"]
    fields = {"attention_mask": torch.ones_like(tokens, dtype=torch.bool), "kept": torch.arange(tokens.numel())}
    return replace(batch, fields={**fields, **batch.fields, "kept": fields["kept"]})


def open_rows(config: PosBertConfig, paths: Sequence[MemberPath]) -> Rows:
    """Open text data sets (see `Upstream.open_rows`)."""
    require_kind(paths, config.reads)
    datasets = [open_text_dataset(path.path, path.name) for path in paths]
    meta = agree(datasets)
    if meta.length > config.model.max_positions:
        raise RefusedError(
            f"{paths[0].path}: sequences of {meta.length} pieces, model.max_positions is {config.model.max_positions}; "
            f"give --model.max_positions {meta.length}, or shard the data with a smaller length"
        )
    if meta.segments and config.model.kind != "modern":
        raise RefusedError(
            f"{paths[0].path}: packed rows, model.kind is {config.model.kind}; give --model.kind modern, or shard the "
            "data without --pack"
        )
    return Rows.from_datasets(datasets, meta, TextBatchBuilder(config, datasets, meta))
