"""One portion of the corpus -> the rows of one shard: documents, sentences, tagged pieces, rows, blocks."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trp_scale.data.text.dataset import GROUP_BITS, GROUPS, OTHER
from trp_scale.sharding.job.job import PortionReport, shard_stem
from trp_scale.sharding.job.writing import ShardWriter
from trp_scale.sharding.text.annotate import Annotated, Annotator
from trp_scale.sharding.text.corpus import TextPortion
from trp_scale.sharding.text.documents import Document, ReadSettings, read_portion
from trp_scale.sharding.text.splitting import SentenceSplitter

BATCH_SENTENCES = 2000
"""Sentences that are tagged and tokenized together."""


@dataclass(kw_only=True)
class TextReport(PortionReport):
    """Counts of a portion of text."""

    documents: int = 0
    sentences: int = 0
    words: int = 0
    pieces: int = 0
    unknown_pieces: int = 0
    rows: int = 0
    words_per_group: list[int] = field(default_factory=lambda: [0] * len(GROUPS))
    pieces_per_group: list[int] = field(default_factory=lambda: [0] * len(GROUPS))


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


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """The form of the stored rows."""

    row_length: int
    rows_per_block: int
    pad: int
    unknown: int
    token_dtype: str


class PortionWriter:
    """Turns documents into rows and writes them in blocks to an open shard."""

    def __init__(self, shard: ShardWriter, stem: str, annotator: Annotator, settings: RowSettings) -> None:
        self._shard = shard
        self._stem = stem
        self._annotator = annotator
        self._settings = settings
        self._splitter = SentenceSplitter()
        self._packer = RowPacker(settings.row_length)
        self._sentences: list[str] = []
        self._ends: list[tuple[int, Document]] = []  # documents that end among the sentences, and where
        self._document_pieces = 0
        self._tokens: list[NDArray[np.uint32]] = []
        self._tags: list[NDArray[np.uint8]] = []
        self.report = TextReport()

    def add_document(self, document: Document) -> None:
        """Add one document; sentences wait until there are enough to be worked on together."""
        for sentence in self._splitter.split(document.text):
            self._sentences.append(sentence)
            if len(self._sentences) == BATCH_SENTENCES:
                self._add_sentences()
        self._ends.append((len(self._sentences), document))

    def finish(self) -> None:
        """Write the last block."""
        self._add_sentences()
        if self._packer.lengths:
            self._write_block(len(self._packer.lengths))

    def _add_sentences(self) -> None:
        """Tag, tokenize and pack the sentences that wait, and end the documents that end among them."""
        annotated: Annotated = self._annotator.annotate(self._sentences)
        start = 0
        ends = iter([*self._ends, (-1, None)])
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
        while len(self._packer.lengths) >= self._settings.rows_per_block:
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
        report.unknown_pieces += int((annotated.tokens == self._settings.unknown).sum())
        pieces_per_group = np.bincount(annotated.tags & GROUP_BITS, minlength=len(GROUPS))
        report.words_per_group = (annotated.words_per_group + report.words_per_group).tolist()
        report.pieces_per_group = (pieces_per_group + report.pieces_per_group).tolist()

    def _write_block(self, rows: int) -> None:
        """Write the first `rows` finished rows as one sample."""
        settings = self._settings
        lengths, ends = self._packer.take(rows)
        count = int(lengths.sum())
        tokens, tags = np.concatenate(self._tokens), np.concatenate(self._tags)  # [P]
        self._tokens, self._tags = [tokens[count:]], [tags[count:]]
        token_rows = fill_rows(tokens[:count].astype(settings.token_dtype), lengths, settings.row_length, settings.pad)
        members = {
            "tokens.npy": _npy_bytes(token_rows),  # [R, row_length]
            "tags.npy": _npy_bytes(fill_rows(tags[:count], lengths, settings.row_length, OTHER)),  # [R, row_length]
            "sentences.npy": _npy_bytes(pad_sentence_ends(ends)),  # [R, S]
        }
        self._shard.add(f"{self._stem}-{len(self._shard):05d}", rows, members)
        self.report.rows += rows


def write_portion(
    portion: TextPortion,
    shard: ShardWriter,
    annotator: Annotator,
    read: ReadSettings,
    rows: RowSettings,
    advance: Callable[[int, int, int], None],
) -> TextReport:
    """Fill the shard of a portion.

    Args:
        advance: called as the work goes on with the (documents, words, bytes) since the last call; the bytes add up to
            the portion's size.
    """
    with _no_collection():
        writer = PortionWriter(shard, shard_stem("text", portion.number), annotator, rows)
        report = writer.report
        reported = characters = 0
        for document in read_portion(portion, read):
            if not isinstance(document, Document):
                detail = f"{document.reason}: {document.detail} found" if document.detail else ""
                report.skip(document.reason, document.location, detail)
                continue
            writer.add_document(document)
            advance(1, report.words - reported, len(document.text))
            reported, characters = report.words, characters + len(document.text)
        writer.finish()
        advance(0, report.words - reported, portion.size - characters)
    return report


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's cycle collector: sharding makes no cycles, and walking through the remembered units takes 15 % of
    its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _npy_bytes(array: NDArray[Any]) -> bytes:
    """The array as a .npy file of version 1.0, which can be memory-mapped."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return stream.getvalue()
