"""Reader of the documents of a portion. Documents that cannot be used are reported with reason and location."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import IO

from trp_scale.config.files import parse_json
from trp_scale.data.raw_files import check_rows, load_dataset, open_regular
from trp_scale.errors import RefusedError, quote
from trp_scale.sharding.text.corpus import LARGEST_SHARD, Span, TextPortion, open_parquet

SKIP_REASONS = {
    "unreadable": "the file cannot be opened or read",
    "invalid_utf8": "bytes that are not UTF-8, or an unpaired surrogate",
    "control_characters": "control characters other than tab and line ends",
    "empty": "only white space, or no word piece",
    "long_line": "a line longer than --max_line_bytes",
    "not_json": "a line that is not a JSON object",
    "no_text": "no string in the field or column of --text_field",
    "gzip": "a gzipped file; rename it to .gz",
    "parquet": "a parquet file; rename it to .parquet, or give --format parquet",
    "packed": "a zip or zstd file; unpack it",
}
"""Why a document is skipped."""

_SIGNATURES = {b"\x1f\x8b": "gzip", b"PAR1": "parquet", b"PK\x03\x04": "packed", b"\x28\xb5\x2f\xfd": "packed"}
"""First bytes of binary files with a wrong suffix."""

CHUNK = LARGEST_SHARD
"""Maximum bytes of a file in memory: small gzipped or sparse files may expand to any size."""

_ROWS = 16
"""Parquet rows read together. With 1,024 rows, a file of 813 bytes (all rows share a text of 10 MB) took 10 GB. 16 rows
cost 1 us more per row."""

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_ENDS = str.maketrans({"\x0b": "\n", "\x0c": "\n", "\x85": "\n"})
_BLANK_LINES = re.compile(rb"\r?\n[ \t\r]*\n[ \t\r\n]*")
"""No repeated group: `re` stores every repetition, which took 3 GB for 64 KB of gzipped line ends."""


@dataclass(frozen=True)
class Document:
    """Text of a document and its location (a function, because counting lines takes time)."""

    text: str
    location: Callable[[], str]


@dataclass(frozen=True)
class Skipped:
    """Skipped document. `reason`: key of SKIP_REASONS; `location`: file:line or file:row; `detail`: the value found
    instead of text, or ""."""

    reason: str
    location: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """How documents are read. `source_field`, `source`: only JSON lines with this value in this field; "" = all."""

    text_field: str
    split: str
    one_document_per_file: bool
    max_line_bytes: int
    source_field: str = ""
    source: str = ""


def read_portion(portion: TextPortion, settings: ReadSettings) -> Iterator[Document | Skipped]:
    """Yield documents and skipped documents of a portion in order."""
    for span in portion.items:
        if span.kind == "dataset":
            yield from _read_dataset(span, settings)
        elif span.kind == "parquet":
            yield from _read_parquet(span, settings)
        else:
            yield from _read_file(span, settings)


def _read_dataset(span: Span, settings: ReadSettings) -> Iterator[Document | Skipped]:
    rows = load_dataset(span.path, settings.split)
    if settings.text_field not in rows.column_names:
        fields = quote(rows.column_names)
        yield from (Skipped("no_text", f"{span.path}:{row}", fields) for row in range(span.start, span.end))
        return
    column = rows.select_columns([settings.text_field])
    check_rows(column, span.start, span.end, f"input {span.path}")
    for row in range(span.start, span.end):
        name = partial("{}:{}".format, span.path, row)
        try:
            text = column[row][settings.text_field]
        except Exception:  # of pyarrow, of many kinds
            yield Skipped("unreadable", name())
            continue
        yield _document(text, name)


def _read_parquet(span: Span, settings: ReadSettings) -> Iterator[Document | Skipped]:
    """Read the row groups of a span; if a group is damaged, its rest is skipped."""
    with open_parquet(span.path) as opened:
        if settings.text_field not in opened.schema_arrow.names:
            fields = quote(opened.schema_arrow.names)
            yield from (Skipped("no_text", f"{span.path}:{row}", fields) for row in range(span.start, span.end))
            return
        import pyarrow

        first = 0
        for group in range(opened.num_row_groups):
            last = first + opened.metadata.row_group(group).num_rows
            if first < span.end and last > span.start:
                row = first
                try:
                    batches = opened.iter_batches(_ROWS, row_groups=[group], columns=[settings.text_field])
                    for text in islice(chain.from_iterable(b.column(0).to_pylist() for b in batches), last - first):
                        if span.start <= row < span.end:
                            yield _document(text, partial("{}:{}".format, span.path, row))
                        row += 1
                except (OSError, ValueError, pyarrow.ArrowException):
                    pass
                if row < min(last, span.end):
                    yield Skipped("unreadable", f"{span.path}:{max(row, span.start)}")
            first = last


def _read_file(span: Span, settings: ReadSettings) -> Iterator[Document | Skipped]:
    before = cache(partial(_lines_before, span))
    passed = 0
    try:
        with open_regular(span.path) as file, gzip.open(file, "rb") if span.gzipped else file as stream:
            head = stream.read(4)
            if kind := next((kind for first, kind in _SIGNATURES.items() if head.startswith(first)), ""):
                yield Skipped(kind, span.path)
                return
            stream.seek(0)
            for number, data in enumerate(_pieces(stream, span, settings)):
                first = number == 0 and span.start == 0
                yield from _documents(data, _LineNumbers(span, data, before, passed), settings, first=first)
                passed += data.count(b"\n")
    except (OSError, EOFError, zlib.error):  # the latter two of gzip
        yield Skipped("unreadable", span.path)


def _pieces(stream: gzip.GzipFile | IO[bytes], span: Span, settings: ReadSettings) -> Iterator[bytes]:
    """Yield a span in pieces that end at possible ends of documents: after a blank line within CHUNK, otherwise after a
    line (always for JSON lines). A too long line is truncated to max_line_bytes + 1 bytes."""
    blank = _BLANK_LINES if span.kind == "text" else None
    left, dropping = b"", False
    blocks = _blocks(stream, span)
    block = next(blocks, b"")
    while block:
        if dropping:
            _, newline, block = block.partition(b"\n")
            dropping, block = not newline, newline + block
        left += block
        block = next(blocks, b"")
        if block:  # otherwise the rest is the last piece
            end = 0
            for match in blank.finditer(left) if blank else ():
                end = match.end()
            if end in (0, len(left)):
                end = left.rfind(b"\n") + 1
            if end:
                yield left[:end]
            left = left[end:]
            if len(left) > settings.max_line_bytes:
                left, dropping = left[: settings.max_line_bytes + 1], True
    if left:
        yield left


def _blocks(stream: gzip.GzipFile | IO[bytes], span: Span) -> Iterator[bytes]:
    """Yield the bytes of a span in blocks of CHUNK bytes."""
    size = sys.maxsize if span.gzipped else span.end - span.start
    if not span.gzipped:
        stream.seek(span.start)
    while size and (block := stream.read(min(CHUNK, size))):
        size -= len(block)
        yield block


def _documents(
    data: bytes, lines: _LineNumbers, settings: ReadSettings, *, first: bool
) -> Iterator[Document | Skipped]:
    """Yield the documents in bytes of a file; `first`: the bytes start the file."""
    skip = 3 if first and data.startswith(b"\xef\xbb\xbf") else 0  # byte order mark
    if lines.span.kind == "jsonl":
        for start, line in _lines(data, skip):
            document = _json_document(line, start, lines, settings) if line.strip() else None
            if document is not None:
                yield document
    elif settings.one_document_per_file:
        yield _text_document(data[skip:], skip, lines, settings)
    else:
        start = skip
        for match in chain(_BLANK_LINES.finditer(data), (None,)):
            end = len(data) if match is None else match.start()
            part = data[start:end]
            if part.strip():
                yield _text_document(part, start, lines, settings)
            start = end if match is None else match.end()


def _lines(data: bytes, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of each line from `start` on; a list of short lines would take 20 times the memory."""
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        yield start, data[start:end]
        start = end + 1


def _lines_before(span: Span) -> int:
    """Count the lines of a file before a span."""
    if span.gzipped:
        return 0
    count = 0
    with open_regular(span.path) as stream:
        left = span.start
        while left > 0 and (block := stream.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


class _LineNumbers:
    """Line numbers in a piece of a span.

    Args:
        before: returns the number of lines before the span; called on demand.
        passed: number of lines of the span before the piece.
    """

    def __init__(self, span: Span, data: bytes, before: Callable[[], int], passed: int) -> None:
        self.span = span
        self._data, self._before, self._passed = data, before, passed
        self._counted = self._lines = 0

    def location(self, offset: int) -> str:
        """Return file:line of a byte of the piece. Ascending offsets continue the count: otherwise 8 KB of gzipped
        invalid JSON lines would take hours."""
        if offset < self._counted:
            self._counted = self._lines = 0
        self._lines += self._data.count(b"\n", self._counted, offset)
        self._counted = offset
        return f"{self.span.path}:{self._before() + self._passed + self._lines + 1}"


def _json_document(line: bytes, start: int, lines: _LineNumbers, settings: ReadSettings) -> Document | Skipped | None:
    """Return the document of a line; `None` if it is from another source."""
    if len(line) > settings.max_line_bytes:
        return Skipped("long_line", lines.location(start))
    try:
        record = parse_json(line.decode("utf-8"), "a line", check_limits=False)  # only one field is used
    except UnicodeDecodeError:
        return Skipped("invalid_utf8", lines.location(start))
    except RefusedError:
        return Skipped("not_json", lines.location(start))
    if not isinstance(record, dict):
        return Skipped("not_json", lines.location(start))
    if settings.source_field and record.get(settings.source_field) != settings.source:
        return None
    text = record.get(settings.text_field)
    if not isinstance(text, str):
        value = quote(text) if settings.text_field in record else quote(list(record))
        return Skipped("no_text", lines.location(start), value)
    return _document(text, partial(lines.location, start))


def _text_document(data: bytes, start: int, lines: _LineNumbers, settings: ReadSettings) -> Document | Skipped:
    if len(data) > settings.max_line_bytes:
        for position, line in _lines(data):
            if len(line) > settings.max_line_bytes:
                return Skipped("long_line", lines.location(start + position))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Skipped("invalid_utf8", lines.location(start + error.start))
    match = _CONTROL.search(text)
    if match is not None:
        return Skipped("control_characters", lines.location(start + len(text[: match.start()].encode("utf-8"))))
    return _document(text, partial(lines.location, start))


def _document(text: object, name: Callable[[], str]) -> Document | Skipped:
    """Return the document with form feeds and similar characters as line ends, or the reason to skip it."""
    if not isinstance(text, str):
        return Skipped("no_text", name())
    if _SURROGATE.search(text):
        return Skipped("invalid_utf8", name())
    if _CONTROL.search(text):
        return Skipped("control_characters", name())
    if not text.strip():
        return Skipped("empty", name())
    if "\x0c" in text or "\x0b" in text or "\x85" in text:
        text = text.translate(_LINE_ENDS)
    return Document(text, name)
