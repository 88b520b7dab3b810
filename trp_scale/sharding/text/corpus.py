"""Split of text inputs into portions; one portion becomes one shard.

The split depends only on the files and the settings, not on the number of processes.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import inspect
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

from trp_scale.data.raw_files import (
    GZIP,
    JSON_SUFFIXES,
    PARQUET,
    TEXT_SUFFIXES,
    all_files,
    files_fingerprint,
    is_dataset_directory,
    list_counts,
    load_dataset,
    open_regular,
)
from trp_scale.errors import DataError, error_text
from trp_scale.sharding.workers import Portion

_RATIO = 3
"""Estimated compression ratio of gzip. The trailer of the file has the true size, but only modulo 4 GB."""

SMALLEST_SHARD, LARGEST_SHARD = 256 * 1024, 64 * 1024 * 1024
"""Limits in bytes of the automatic shard size, 1/16 of the input."""

WINDOW = 1 << 20
"""Bytes to search for the end of a document where a large file is split."""

IGNORED_FOLDERS = frozenset({"test", "tests", "turtledemo", "site-packages", "dist-packages", "__pycache__"})
"""Ignored folders of the standard library."""

TOPICS = "pydoc_data/topics.py"

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n\s*")

log = logging.getLogger(__name__)

Kind = Literal["text", "jsonl", "parquet", "dataset"]


@dataclass(frozen=True)
class Span:
    """Range [start, end) of one input: bytes of a file, or rows of a parquet file or Hugging Face dataset."""

    path: str
    kind: Kind
    start: int
    end: int

    @property
    def gzipped(self) -> bool:
        """Whether the span is a gzipped file."""
        return is_gzipped(self.path, self.kind)


TextPortion = Portion[Span]
"""Input of one shard. `size`: bytes, estimated for gzipped files, parquet and datasets."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All portions in order, and a fingerprint of the input files."""

    portions: list[TextPortion]
    fingerprint: str


def plan_corpus(inputs: Sequence[str], kind: str, split: str, one_document_per_file: bool, shard_bytes: int) -> Corpus:
    """Find the input files and split them into portions.

    Args:
        inputs: files, folders, globs or Hugging Face dataset directories.
        kind: "auto" (by suffix), "text", "jsonl", "parquet" or "dataset".
        split: split of a dataset directory.
        one_document_per_file: a text file is one document; otherwise blank lines separate documents.
        shard_bytes: bytes of input per shard; 0 = automatic.

    Raises:
        DataError: an input does not exist or has no file with a known suffix.
    """
    sources = [source for item in inputs for source in _find_files(item, kind)]
    sources = list(dict.fromkeys(sources))
    sizes = [_size(path, source_kind) for path, source_kind in sources]
    limit = shard_bytes or min(LARGEST_SHARD, max(SMALLEST_SHARD, -(-sum(sizes) // 16)))
    portions: list[TextPortion] = []
    pending: list[Span] = []
    pending_size = 0
    for (path, source_kind), size in zip(sources, sizes, strict=True):
        for span, span_size in _split(path, source_kind, size, limit, split):
            pending.append(span)
            pending_size += span_size
            if pending_size >= limit:
                portions.append(TextPortion(len(portions), tuple(pending), pending_size))
                pending, pending_size = [], 0
    if pending:
        portions.append(TextPortion(len(portions), tuple(pending), pending_size))
    digest = hashlib.sha256()
    for (path, source_kind), size in zip(sources, sizes, strict=True):
        digest.update(f"{source_kind} {size} ".encode() + files_fingerprint(_files(path, source_kind)))
    return Corpus(portions=portions, fingerprint=digest.hexdigest())


TABLES = (".csv", ".tsv")
"""Suffixes of tables; their columns are not parsed."""


def _find_files(item: str, kind: str) -> Iterator[tuple[Path, Kind]]:
    """Yield the files of one input, sorted."""
    path = Path(item)
    if path.is_dir():
        if is_dataset_directory(path):
            yield path, "dataset"
            return
        known = (*TEXT_SUFFIXES, *JSON_SUFFIXES, PARQUET) if kind == "auto" else ("",)
        others: Counter[str] = Counter()
        files = all_files(path, others)
        paths = [file for file in files if file.name.lower().removesuffix(GZIP).endswith(known)]
        others.update(file.suffix or file.name for file in sorted(set(files) - set(paths)))
        listed = list_counts(others)
        if not paths:
            raise DataError(
                f"input {item}: no file in this folder ends in {', '.join(known)}, optionally with {GZIP}; "
                f"found: {listed}. Unpack archives; --format text reads all files as text"
            )
        if others:
            log.warning("input %s: left out: %s; --format text reads all files that are not hidden", item, listed)
    elif path.exists() or path.is_symlink():
        paths = [path]
    else:
        paths = sorted(map(Path, glob.glob(item, recursive=True)))  # noqa: PTH207
        if not paths and "://" in item:
            raise DataError(f"input {item}: a URL; local files expected: download it first")
        if not paths:
            raise DataError(
                f"input {item}: no such file or folder, and no file matches this pattern; hub names are not downloaded"
            )
    for file in paths:
        if file.is_dir():
            yield from _find_files(str(file), kind)
            continue
        if kind == "auto" and file.suffix.lower() in TABLES:
            log.warning(
                "input %s: a table, read as plain text with all its columns; to select a text column (--text_field) "
                "convert it to JSON lines or parquet",
                file,
            )
        yield file, _kind(file, kind)


def _kind(file: Path, kind: str) -> Kind:
    if kind == "auto":
        name = file.name.lower()
        if name.endswith(PARQUET):
            return "parquet"
        return "jsonl" if name.removesuffix(GZIP).endswith(JSON_SUFFIXES) else "text"
    for known in ("text", "jsonl", "parquet"):
        if kind == known:
            return known
    raise DataError(f"input {file}: --format {kind} needs a folder written by datasets.save_to_disk")


def _files(path: Path, kind: Kind) -> list[Path]:
    return all_files(path) if kind == "dataset" else [path]


def is_gzipped(path: str, kind: Kind) -> bool:
    """Whether a file of this name and kind is gzipped."""
    return kind in ("text", "jsonl") and path.lower().endswith(GZIP)


def _size(path: Path, kind: Kind) -> int:
    """Return the approximate bytes of text; 0 for an unreadable file, which is reported later."""
    size = sum(os.path.getsize(file) for file in _files(path, kind) if os.access(file, os.R_OK))  # noqa: PTH202
    return _RATIO * size if is_gzipped(str(path), kind) else size


def _split(path: Path, kind: Kind, size: int, limit: int, split: str) -> Iterator[tuple[Span, int]]:
    """Yield spans of one input with their sizes. Only a long document makes a span much larger than `limit`."""
    parts = max(1, -(-size // limit))
    if is_gzipped(str(path), kind):  # no random access
        yield Span(str(path), kind, 0, size), size
        return
    if kind in ("dataset", "parquet"):
        starts = _parquet_starts(str(path)) if kind == "parquet" else [0, len(load_dataset(str(path), split))]
        rows = starts[-1]
        cuts = [rows * part // parts for part in range(parts + 1)]
        if len(starts) > parts:  # read each row group in one portion
            cuts = sorted({min(starts, key=lambda start: abs(start - cut)) for cut in cuts})
        for start, end in pairwise(cuts):
            yield Span(str(path), kind, start, end), size * (end - start) // max(1, rows)
        return
    start = 0
    for part in range(1, parts):
        end = _next_start(path, kind, size * part // parts, size)
        if end > start:
            yield Span(str(path), kind, start, end), end - start
            start = end
    if start < size or size == 0:
        yield Span(str(path), kind, start, size), size - start


def _next_start(path: Path, kind: Kind, nominal: int, size: int) -> int:
    """Return the first byte from `nominal` on where a document may start: after a blank line within WINDOW, otherwise
    after a line."""
    try:
        with open_regular(path) as stream:
            stream.seek(nominal)
            window = stream.read(WINDOW)
            blank = _BLANK_LINE.search(window) if kind == "text" else None
            if blank is not None:
                return nominal + blank.end()
            position = nominal
            while window:
                line_end = window.find(b"\n")
                if line_end >= 0:
                    return position + line_end + 1
                position += len(window)
                window = stream.read(WINDOW)
    except OSError:  # reported as unreadable when the portion is read
        return size
    return size


def _parquet_starts(path: str) -> list[int]:
    """Return the first row of each row group of a parquet file, and finally the number of rows."""
    with open_parquet(path) as opened:
        groups = [opened.metadata.row_group(number).num_rows for number in range(opened.num_row_groups)]
    return list(accumulate(groups, initial=0))


def open_parquet(path: str):  # type: ignore[no-untyped-def]  # pyarrow is an extra without types here
    """Open a parquet file.

    Raises:
        DataError: the extra is not installed, or the file is damaged.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"input {path}: reading parquet needs `pip install trp-scale[datasets]`") from error
    try:
        open_regular(path).close()
        return parquet.ParquetFile(path, memory_map=True)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"input {path}: not a parquet file that can be read ({error_text(error)})") from error


def embedded_documents() -> Iterator[tuple[str, str]]:
    """Yield a small English corpus from CPython: its language reference and the docstrings of the standard library.

    Sources are parsed, never imported. The order is fixed for a Python version.

    Yields:
        (name, text) of each topic of the reference and of each module with docstrings.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = _topics(library / TOPICS)
    for name in sorted(topics):
        yield f"topics/{name}", topics[name].strip()
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if IGNORED_FOLDERS.isdisjoint(relative.parts):
            text = "\n\n".join(_docstrings(path))
            if text:
                yield relative.as_posix(), text


def _topics(path: Path) -> dict[str, str]:
    """Return the dictionary `topics` of pydoc_data."""
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            value = ast.literal_eval(statement.value)
            return {str(name): str(text) for name, text in value.items()}
    raise LookupError(f"{path}: no topics found; this Python has no language reference")


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a source file in order, without interactive examples."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some library files are invalid on purpose
        return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            prose = _without_examples(inspect.cleandoc(text)) if text else ""
            if prose:
                yield prose
            stack.extend(reversed(node.body))
        elif isinstance(node, ast.If | ast.Try):
            stack.extend(reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]))


def _without_examples(text: str) -> str:
    """Remove the lines from each `>>>` to the next blank line: code is not English."""
    kept = []
    example = False
    for line in text.splitlines():
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            kept.append(line)
    return "\n".join(kept).strip()
