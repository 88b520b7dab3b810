"""How text rows become a Batch: pair, lay out, mask. One of several kinds of rows behind the same order and loader."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.sources import Rows, require_kind
from trp_scale.data.tar_reader import ArrayReader
from trp_scale.data.text.dataset import (
    WORD_START,
    TextDataset,
    TextMeta,
    TextRowReader,
    TextRows,
    agree,
    open_text_dataset,
)
from trp_scale.pretraining.pos_bert.masking import Masked, TokenMasker
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

Flags = npt.NDArray[np.bool_]

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
    """Draw the next-sentence pair of each row from its state (BERT, Devlin et al. 2019, as TRP 001 D.1 uses them).

    Each row is split at a sentence end into A and the rest. With probability 1/2 B is the rest (label 0, "is next" in
    transformers' convention), else B comes from another row of the *same block* (label 1). Not of the shuffled group:
    which blocks share a group changes from epoch to epoch. A pair is a function of (seed, row key, masking) and of the
    block's content alone, so that ten static maskings really are ten.

    The B of a wrong pair is the partner row's longest tail of whole sentences that is no longer than the continuation
    it stands for; if even the last sentence is longer, its beginning. A right B ends where a row ends and so does a
    wrong one, and their lengths are alike, so that neither the length nor a cut-off end gives the label away.

    What is left for odd rows: one of a single sentence is split at the start of a word, one of a single word anywhere;
    a single piece is A and always gets a wrong B; in a block of one row every pair is right; a single piece alone in
    its block, and a row without pieces, get an empty right B.

    Args:
        alone: [R] rows that are their own partner.
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


class TextBatchBuilder:
    """Makes batches of `[CLS] A [SEP] B [SEP]`, always padded to the data set's length L, with M masked slots.

    Fields of the batch, first dimension rows but for `kept`:
        tokens [R, L] int64: ids after masking. token_types [R, L] int64: 1 on B and its [SEP].
        attention_mask [R, L] bool: True up to the last [SEP]; absent where nothing is padded, unless the run is
            compiled: with and without a mask each block would need two graphs.
        kept [K] int64: places of the R * L that are computed (`kept_places`); absent where the mask is.
        masked_positions [R, M] int64: ascending; unused slots are 0. labels [R, M] int64: original ids.
        label_groups [R, M] int64: group number 0..9. label_weights [R, M] float32: 1, or 0 in unused slots.
        next_sentence [R] int64: 0 = B follows A, 1 = B is from elsewhere (all 0 when objective.next_sentence = off).
        row_weights [R] float32: 1, or 0 for a row that is not there or cannot be read; it then is [CLS] [SEP] [SEP].

    All draws come from (training.seed, row key, epoch modulo masking.maskings).
    """

    def __init__(self, config: PosBertConfig, datasets: list[TextDataset], meta: TextMeta) -> None:
        special = meta.special_tokens
        self._pad, self._cls, self._sep = special["pad"], special["cls"], special["sep"]
        self._length = meta.length
        self._pairs = config.objective.next_sentence != "off"
        self._maskings = config.masking.maskings
        self._seed = config.training.seed
        self._always_masked = config.training.compile in ("blocks", "whole")
        self._block_rows = [dataset.blocks.rows for dataset in datasets]
        self._reader = TextRowReader(
            readers=[ArrayReader(dataset.samples, dataset.blocks, verify=config.data.verify) for dataset in datasets],
            names=[dataset.name for dataset in datasets],
            row_length=meta.row_length,
            token_dtype=meta.token_dtype,
            vocab_size=meta.vocab_size,
        )
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
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=self._maskings)
        rows, segments = self._read(addresses, states)
        tokens, tags, token_types, pieces, attended = self._lay_out(rows, segments)
        masked = self._masker.mask(tokens, tags, pieces, states)
        present = addresses.present & rows.readable
        fields = _fields(masked, token_types, attended, segments, present)
        if attended.all() and not self._always_masked:
            del fields["attention_mask"]
        else:
            fields["kept"] = torch.from_numpy(kept_places(attended))
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
        """Tokens, tags, token types, which are real pieces, and which are attended to; each [R, L]."""
        column = np.arange(self._length)
        first_stop = 1 + segments.first_length[:, None]  # [R, 1] place of the first [SEP]
        second_stop = first_stop + 1 + segments.second_length[:, None]  # place of the second [SEP]
        if not self._pairs:
            second_stop = first_stop
        in_first = (column >= 1) & (column < first_stop)  # [R, L]
        in_second = (column > first_stop) & (column < second_stop)
        pieces = in_first | in_second
        first_shift = segments.first_start - 1  # [R] from a place in the sequence to one in the flat rows
        second_shift = segments.second_start - segments.first_length - 2
        source = column + first_shift[:, None] + in_second * (second_shift - first_shift)[:, None]  # [R, L]
        source *= pieces  # products: several times faster than np.where
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
"""Lists of places have so many lengths at most: a GPU's memory is reused from one micro-batch to the next only where
tensors are of a size that it has seen."""


def kept_places(attended: Flags) -> Integers:
    """Places, ascending, of the flattened rows that a micro-batch computes: the real ones, and the first that are
    padded up to the next 64th of them all.

    Args:
        attended: [R, L] True at real places.
    """
    real = attended.ravel()
    part = -(-real.size // KEPT_LENGTHS)
    spare = -int(real.sum()) % part
    return np.flatnonzero(real | (np.cumsum(~real) <= spare))


def keeping_all(batch: Batch) -> Batch:
    """The batch with all its places in the list."""
    tokens = batch["tokens"]
    fields = {"attention_mask": torch.ones_like(tokens, dtype=torch.bool), "kept": torch.arange(tokens.numel())}
    return replace(batch, fields={**fields, **batch.fields, "kept": fields["kept"]})


def open_rows(config: PosBertConfig, paths: Sequence[MemberPath]) -> Rows:
    """Open data sets of text.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: settings that do not fit the data or each other, or data of another kind.
    """
    require_kind(paths, config.reads)
    datasets = [open_text_dataset(path.path, path.name) for path in paths]
    meta = agree(datasets)
    if meta.length > config.model.max_positions:
        raise RefusedError(
            f"{paths[0].path}: sequences of {meta.length} pieces, model.max_positions is {config.model.max_positions}; "
            f"raise it (--model.max_positions {meta.length}), or shard the data with a smaller length"
        )
    return Rows.from_datasets(datasets, meta, TextBatchBuilder(config, datasets, meta))
