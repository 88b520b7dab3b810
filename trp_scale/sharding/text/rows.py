"""Rows of text: sentences or documents packed into rows, and rows written as blocks of a shard."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trp_scale.data.text.dataset import GROUP_BITS, GROUPS, OTHER, Flags, segment_places
from trp_scale.sharding.job import shard_stem
from trp_scale.sharding.parts import PortionReport, ShardWriter
from trp_scale.sharding.text.annotate import Annotated, Annotator
from trp_scale.sharding.text.corpus import TextPortion
from trp_scale.sharding.text.documents import Document, ReadSettings, read_portion
from trp_scale.sharding.text.splitting import SentenceSplitter

BATCH_SENTENCES = 2000
"""Sentences tagged and tokenized together."""


@dataclass(kw_only=True)
class TextReport(PortionReport):
    """Counts of a portion of text."""

    documents: int = 0
    sentences: int = 0
    words: int = 0
    pieces: int = 0
    unknown_pieces: int = 0
    rows: int = 0
    segments: int = 0
    padding: int = 0
    words_per_group: list[int] = field(default_factory=lambda: [0] * len(GROUPS))
    pieces_per_group: list[int] = field(default_factory=lambda: [0] * len(GROUPS))


class RowPacker:
    """Packing of sentences into rows.

    Pieces form a flat stream, and rows are consecutive ranges of it. A sentence is added to the open row if it fits,
    otherwise it opens a new row. A sentence longer than a row is split at the last word start that fits (inside a word
    if there is none), and its rest stays open for the next sentences.

    Attributes:
        ends: ends (exclusive, in pieces) of the sentences of each finished row.
    """

    def __init__(self, row_length: int) -> None:
        self.row_length = row_length
        self.ends: list[list[int]] = []
        self._open: list[int] = []

    def add_sentence(self, length: int, word_starts: NDArray[np.bool_] | None = None) -> None:
        """Add a sentence.

        Args:
            length: number of pieces; 0 adds nothing.
            word_starts: [length], whether each piece starts a word; required if the sentence is longer than a row.
        """
        if length == 0:
            return
        filled = self._open[-1] if self._open else 0
        if filled + length > self.row_length:
            self.end_row()
            filled = 0
        start = 0
        while length - start > self.row_length:
            limit = start + self.row_length
            end = limit
            if word_starts is not None and word_starts[start + 1 : limit + 1].any():
                end = start + 1 + int(np.flatnonzero(word_starts[start + 1 : limit + 1])[-1])
            self._open.append(end - start)
            self.end_row()
            start = end
        self._open.append(filled + length - start)

    def end_document(self) -> None:
        """Finish the open row: a row has sentences of one document only."""
        self.end_row()

    def end_row(self) -> None:
        """Finish the open row."""
        if self._open:
            self.ends.append(self._open)
            self._open = []

    def take(self, rows: int) -> NDArray[np.uint16]:
        """Remove the first `rows` finished rows; return their ends [rows, S], padded with the last end of each row."""
        ends, self.ends = self.ends[:rows], self.ends[rows:]
        width = max(map(len, ends))
        return np.asarray([row + [row[-1]] * (width - len(row)) for row in ends], dtype=np.uint16)

    def places(self, ends: NDArray[np.uint16]) -> tuple[Flags, Flags, Flags]:
        """Return where rows have [CLS], pieces of text and [SEP], each [R, row_length]."""
        text = np.arange(self.row_length) < ends[:, -1:]
        return np.zeros_like(text), text, np.zeros_like(text)


SHORTEST_PART = 8
"""Pieces of the first part of a document; in a row with less room, the document begins in the next row."""


class SegmentPacker(RowPacker):
    """Packing of documents into rows as segments [CLS] ... [SEP], in their order.

    A document that does not fit into the open row is cut where the row is full, so that rows have almost no padding.

    Args:
        row_length: L.
        segments: maximum segments of a row.

    Attributes:
        ends: ends (exclusive, in positions) of the segments of each finished row.
    """

    def __init__(self, row_length: int, segments: int) -> None:
        super().__init__(row_length)
        self._segments = segments
        self._pieces = 0  # of the document

    def add_sentence(self, length: int, word_starts: NDArray[np.bool_] | None = None) -> None:
        """Add pieces of the document; `word_starts` are not read."""
        self._pieces += length

    def end_document(self) -> None:
        """Place the document."""
        while self._pieces:
            filled = self._open[-1] if self._open else 0
            room = self.row_length - filled - 2
            if len(self._open) == self._segments or (self._open and room < min(self._pieces, SHORTEST_PART)):
                self.end_row()
                continue
            part = min(self._pieces, room)
            self._open.append(filled + part + 2)
            self._pieces -= part

    def places(self, ends: NDArray[np.uint16]) -> tuple[Flags, Flags, Flags]:
        """Return where rows have [CLS], pieces of text and [SEP], each [R, row_length]."""
        return segment_places(ends.astype(np.int64), self.row_length)


def fill_rows(values: NDArray[np.generic], text: Flags, padding: int) -> NDArray[np.generic]:
    """Return rows [R, L] with a flat stream of values at the positions of `text`, and padding elsewhere."""
    rows = np.full(text.shape, padding, dtype=values.dtype)
    rows[text] = values
    return rows


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Format of stored rows. `special`: id of each role. `segments`: maximum of a packed row; 0 = not packed."""

    row_length: int
    rows_per_block: int
    special: Mapping[str, int]
    token_dtype: str
    segments: int = 0

    def make_packer(self) -> RowPacker:
        """Return an empty packer."""
        return SegmentPacker(self.row_length, self.segments) if self.segments else RowPacker(self.row_length)


class PortionWriter:
    """Writer of documents as blocks of rows to an open shard."""

    def __init__(self, shard: ShardWriter, stem: str, annotator: Annotator, settings: RowSettings) -> None:
        self._shard = shard
        self._stem = stem
        self._annotator = annotator
        self._settings = settings
        self._splitter = SentenceSplitter()
        self._packer = settings.make_packer()
        self._whole_documents = settings.segments > 0 and not annotator.by_unit
        self._sentences: list[str] = []
        self._ends: list[tuple[int, Document]] = []  # (end in self._sentences, document)
        self._document_pieces = 0
        self._tokens: list[NDArray[np.uint32]] = []
        self._tags: list[NDArray[np.uint8]] = []
        self.report = TextReport()

    def add_document(self, document: Document) -> None:
        """Add one document; sentences are processed in batches."""
        for sentence in self._splitter.split(document.text):
            self._sentences.append(sentence)
            if len(self._sentences) >= BATCH_SENTENCES and not self._whole_documents:
                self._add_sentences()
        self._ends.append((len(self._sentences), document))
        if len(self._sentences) >= BATCH_SENTENCES:
            self._add_sentences()

    def finish(self) -> None:
        """Write the last block."""
        self._add_sentences()
        self._packer.end_row()
        if self._packer.ends:
            self._write_block(len(self._packer.ends))

    def _add_sentences(self) -> None:
        """Tag, tokenize and pack the pending sentences, and end their documents."""
        documents, last_units = None, self._ends
        if self._whole_documents:  # lengths are then of documents
            documents = [(end, document.text) for end, document in self._ends]
            last_units = [(number, document) for number, (_, document) in enumerate(self._ends, 1)]
        annotated: Annotated = self._annotator.annotate(self._sentences, documents)
        start = 0
        ends = iter([*last_units, (-1, None)])
        end, document = next(ends)
        for position in range(len(annotated.lengths) + 1):
            while position == end and document is not None:
                self._end_document(document)
                end, document = next(ends)
            if position < len(annotated.lengths):
                length = annotated.lengths[position]
                long = length > self._settings.row_length
                self._packer.add_sentence(length, annotated.tags[start : start + length] > GROUP_BITS if long else None)
                self._document_pieces += length
                start += length
        self._sentences, self._ends = [], []
        self._tokens.append(annotated.tokens)
        self._tags.append(annotated.tags)
        self._count(annotated)
        while len(self._packer.ends) >= self._settings.rows_per_block:
            self._write_block(self._settings.rows_per_block)

    def _end_document(self, document: Document) -> None:
        self._packer.end_document()
        if self._document_pieces == 0:
            self.report.skip("empty", document.location())
        else:
            self.report.documents += 1
        self._document_pieces = 0

    def _count(self, annotated: Annotated) -> None:
        report = self.report
        report.sentences += sum(1 for length in annotated.lengths if length)
        report.words += int(annotated.words_per_group.sum())
        report.pieces += len(annotated.tokens)
        report.unknown_pieces += int((annotated.tokens == self._settings.special["unk"]).sum())
        pieces_per_group = np.bincount(annotated.tags & GROUP_BITS, minlength=len(GROUPS))
        report.words_per_group = (annotated.words_per_group + report.words_per_group).tolist()
        report.pieces_per_group = (pieces_per_group + report.pieces_per_group).tolist()

    def _write_block(self, rows: int) -> None:
        """Write the first `rows` finished rows as one sample."""
        settings, special = self._settings, self._settings.special
        ends = self._packer.take(rows)  # [R, S]
        first, text, last = self._packer.places(ends)  # [R, row_length]
        count = int(text.sum())
        tokens, tags = np.concatenate(self._tokens), np.concatenate(self._tags)  # [P]
        self._tokens, self._tags = [tokens[count:]], [tags[count:]]
        token_rows = fill_rows(tokens[:count].astype(settings.token_dtype), text, special["pad"])
        token_rows[first], token_rows[last] = special["cls"], special["sep"]
        tag_rows = fill_rows(tags[:count], text, OTHER)
        members = {
            "tokens.npy": _npy_bytes(token_rows),
            "tags.npy": _npy_bytes(tag_rows),
            "sentences.npy": _npy_bytes(ends),
        }
        self._shard.add(f"{self._stem}-{len(self._shard):05d}", rows, members)
        self.report.rows += rows
        self.report.segments += int(first.sum())
        self.report.padding += first.size - int((first | text | last).sum())


class TextWriter:
    """Worker that fills the shard of a portion; keeps the annotation cache.

    Args:
        annotator, read, rows: settings of all portions.
        advance: called with increments of (documents, words, bytes); the bytes add up to the portion size.
    """

    def __init__(
        self, annotator: Annotator, read: ReadSettings, rows: RowSettings, advance: Callable[[int, int, int], None]
    ) -> None:
        self._annotator, self._read, self._rows, self._advance = annotator, read, rows, advance

    def __call__(self, portion: TextPortion, shard: ShardWriter) -> TextReport:
        with _no_collection():
            writer = PortionWriter(shard, shard_stem("text", portion.number), self._annotator, self._rows)
            report = writer.report
            reported = characters = 0
            for document in read_portion(portion, self._read):
                if not isinstance(document, Document):
                    detail = f"{document.reason}: {document.detail} found" if document.detail else ""
                    report.skip(document.reason, document.location, detail)
                    continue
                writer.add_document(document)
                self._advance(1, report.words - reported, len(document.text))
                reported, characters = report.words, characters + len(document.text)
            writer.finish()
            self._advance(0, report.words - reported, portion.size - characters)
        return report


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: sharding makes no cycles, and scanning the cached units takes 15 % of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _npy_bytes(array: NDArray[Any]) -> bytes:
    """Return the array as a .npy file of version 1.0, which can be memory-mapped."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return stream.getvalue()
