"""Text data set: dataset.json, blocks, and rows for micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trp_scale.config.schema import Fields, Whole
from trp_scale.data.binary_index import OrderBlocks
from trp_scale.data.hashing import Integers
from trp_scale.data.index import failure_reason
from trp_scale.data.raw_files import read_dataset
from trp_scale.data.samples import SampleTable, read_samples
from trp_scale.data.tar_reader import ArrayReader, Arrays
from trp_scale.data.tars import StoredPart, TarStore
from trp_scale.errors import DataError, quote

Flags = npt.NDArray[np.bool_]

GROUPS: tuple[str, ...] = (
    "verb",
    "noun",
    "adjective",
    "determiner",
    "adverb",
    "pronoun",
    "preposition",
    "conjunction",
    "interjection",
    "other",
)
"""Names of the groups; shards store the position. The last group takes all other tags."""

OTHER = GROUPS.index("other")

WORD_START = 0x80
"""Bit of a stored tag byte that marks the first piece of a word; the low four bits are the group."""

GROUP_BITS = 0x0F

_TAGS = {
    "verb": "VB VBD VBG VBN VBP VBZ MD",
    "noun": "NN NNS NNP NNPS",
    "adjective": "JJ JJR JJS",
    "determiner": "DT PDT WDT",
    "adverb": "RB RBR RBS WRB RP",
    "pronoun": "PRP PRP$ WP WP$",
    "preposition": "IN TO",
    "conjunction": "CC",
    "interjection": "UH",
}

PENN_TO_GROUP: dict[str, int] = {tag: GROUPS.index(group) for group, tags in _TAGS.items() for tag in tags.split()}


def penn_group(penn_tag: str) -> int:
    """Return the number of the group of a Penn tag; unknown tags belong to `other`."""
    return PENN_TO_GROUP.get(penn_tag, OTHER)


SUFFIXES = ("tokens.npy", "tags.npy", "sentences.npy")
"""Members of a text block. tokens [R, P] uint16 or uint32, tags [R, P] uint8, sentences [R, S] uint16: the ends of
sentences, or of the segments of packed rows."""

PACKED_FORMAT = 2
"""Format of a data set of packed rows: [CLS] ... [SEP] of several segments, P = L."""

LONGEST = 1 << 16
"""Limit of pieces of a sequence: ends of sentences have 16 bits."""

_SPECIAL = ("pad", "unk", "cls", "sep", "mask")


@dataclass(frozen=True, kw_only=True)
class TextMeta:
    """Properties that all rows of a text source share; the members of a mixture may differ in the directories only.

    Attributes:
        length: pieces of a sequence, including [CLS] and [SEP].
        row_length: pieces of a stored row: length - 3, or length of packed rows.
        segments: maximum segments of a packed row; 0 = not packed.
        vocab_size: number of token ids.
        token_dtype: numpy type of stored tokens, uint16 or uint32.
        special_tokens: ids of pad, unk, cls, sep and mask.
        special_token_ids: ids that random replacement excludes.
        groups: names of the groups in the tags.
        tokenizer_digest: hash of the tokenizer directory's content; "" without a tokenizer.
        tokenizer_directories: Hugging Face tokenizer directory of each member, in the order of `data.path`.
    """

    length: int
    row_length: int
    segments: int
    vocab_size: int
    token_dtype: str
    special_tokens: dict[str, int]
    special_token_ids: tuple[int, ...]
    groups: tuple[str, ...]
    tokenizer_digest: str
    tokenizer_directories: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """Opened data set.

    Attributes:
        name: name in the mixture; "" without a mixture.
        meta: properties that its rows share.
        samples: stored blocks.
        blocks: blocks for order and split.
    """

    name: str
    meta: TextMeta
    samples: SampleTable
    blocks: OrderBlocks

    def digest(self) -> str:
        """Digest of dataset.json, tokenizer, indexes and tar sizes; equal on ranks that see the same."""
        packed = (self.meta.segments,) if self.meta.segments else ()  # digests of format 1 stay as they were
        parts = (self.name, self.meta.length, self.meta.vocab_size, self.meta.special_tokens, *packed)
        return f"{parts} {self.meta.tokenizer_digest} {self.samples.digest}"

    def tars(self, block: int) -> list[tuple[TarStore, StoredPart]]:
        """Return the tar of a block, or the part that the cache holds, with its store."""
        return [(self.samples.store, self.samples.stored_part(range(block, block + 1)))]


def open_text_dataset(directory: Path, name: str = "") -> TextDataset:
    """Read dataset.json and all indexes.

    Raises:
        DataError: a file is missing or has another format, or the tars differ from their indexes.
    """
    fields = read_dataset(directory, "text", "shard the data again", newest=PACKED_FORMAT)
    meta = read_text_meta(directory, fields)
    samples, blocks = read_samples(directory / "shards", fields.file_names("shards"), SUFFIXES, None)
    return TextDataset(name=name, meta=meta, samples=samples, blocks=blocks)


def agree(datasets: list[TextDataset]) -> TextMeta:
    """Return the metadata of a mixture.

    Raises:
        DataError: two members differ in a property that all rows must share; names both values.
    """
    first = datasets[0]
    for other in datasets[1:]:
        if first.meta.tokenizer_digest != other.meta.tokenizer_digest:
            raise DataError(
                f"data.path: members of a mixture must have one tokenizer, but {first.name} and {other.name} have "
                f"different ones; shard one again, with --tokenizer {first.meta.tokenizer_directories[0]} or "
                f"{other.meta.tokenizer_directories[0]}"
            )
        for field in fields(TextMeta):
            ours, theirs = getattr(first.meta, field.name), getattr(other.meta, field.name)
            if field.name != "tokenizer_directories" and ours != theirs:
                raise DataError(
                    f"data.path: members of a mixture must have the same {field.name}: "
                    f"{first.name} has {ours!r}, {other.name} has {theirs!r}"
                )
    directories = tuple(path for dataset in datasets for path in dataset.meta.tokenizer_directories)
    return replace(first.meta, tokenizer_directories=directories)


def read_text_meta(directory: Path, fields: Fields) -> TextMeta:
    """Read the metadata from dataset.json.

    Raises:
        DataError: a field is missing or has an impossible value.
    """
    length, row_length = fields.whole("length"), fields.whole("row_length")
    segments = fields.whole("segments_per_row", least=1) if fields.document["format"] == PACKED_FORMAT else 0
    expected = length if segments else length - 3
    if row_length != expected or row_length < 1:
        raise fields.refusal(f"row_length {row_length} found, {expected} expected for length {length}")
    if length > LONGEST:
        raise fields.refusal(f"length {length} found, at most {LONGEST} allowed")
    special = fields.take("special_tokens", dict[str, Whole])
    absent = [name for name in _SPECIAL if name not in special]
    if absent:
        raise fields.refusal(f"special_tokens has no {absent[0]!r}; needed are {', '.join(_SPECIAL)}")
    if (groups := tuple(fields.texts("groups"))) != GROUPS:
        raise fields.refusal(f"groups {quote(list(groups))} found, {list(GROUPS)} expected")
    return TextMeta(
        length=length,
        row_length=row_length,
        segments=segments,
        vocab_size=fields.whole("vocab_size", least=1),
        token_dtype=fields.take("token_dtype", Literal["uint16", "uint32"]),
        special_tokens={name: special[name] for name in _SPECIAL},
        special_token_ids=tuple(sorted(fields.take("special_token_ids", list[Whole]))),
        groups=groups,
        tokenizer_digest=tokenizer_digest(directory / "tokenizer"),
        tokenizer_directories=(directory / "tokenizer",),
    )


def segment_places(ends: Integers, length: int) -> tuple[Flags, Flags, Flags]:
    """Return where packed rows have [CLS], pieces of text and [SEP], each [R, L].

    Args:
        ends: [R, S] ends of the segments, ascending, padded with the last one; 0 in an empty row.
    """
    column = np.arange(length)
    used = column < ends[:, -1:]  # [R, L]
    last = np.zeros_like(used)
    np.put_along_axis(last, np.maximum(ends - 1, 0), True, axis=1)
    last &= used
    first = used.copy()
    first[:, 1:] &= last[:, :-1]
    return first, used & ~first & ~last, last


def tokenizer_digest(directory: Path) -> str:
    """Hash the vocabulary file, which determines the meaning of ids; "" without one."""
    for name in ("tokenizer.json", "vocab.txt"):
        if (directory / name).is_file():
            return hashlib.blake2b((directory / name).read_bytes(), digest_size=16).hexdigest()
    return ""


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Stored rows; P pieces a row, S sentence ends.

    Attributes:
        tokens: [N, P] uint16 or uint32, as stored.
        tags: [N, P] uint8.
        ends: [N, S] int64, end offsets of sentences or segments, ascending; padded with the row's number of pieces.
        pieces: [N] number of pieces; 0 for an unreadable row.
        own: [R] index in the arrays above of each address's own row.
        partner: [R] index of its partner.
        readable: [R] whether both rows are readable and have allowed values.
        reasons: errors of blocks, by key.
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
        datasets: members of the mixture; their names are prefixes of the keys of corrupt blocks.
        meta: properties that they share.
        verify: check each member's checksum.
    """

    def __init__(self, datasets: Sequence[TextDataset], meta: TextMeta, *, verify: bool) -> None:
        self._readers = [ArrayReader(dataset.samples, dataset.blocks, verify=verify) for dataset in datasets]
        self._names = [dataset.name for dataset in datasets]
        self._dtypes = (np.dtype(meta.token_dtype), np.dtype(np.uint8), np.dtype(np.uint16))
        self._row_length, self._segments, self._vocab_size = meta.row_length, meta.segments, meta.vocab_size

    def read(self, member: Integers, block: Integers, own: Integers, partner: Integers) -> TextRows:
        """Read the rows `own` and `partner` of each block, all [R].

        Rows are sorted by block and gathered once per block; `TextRows.own` and `.partner` are their indices.
        """
        count = len(own)
        block_code = np.tile(member << 40 | block, 2)  # [2R]
        wanted = np.concatenate([own, partner])
        order = np.argsort(block_code, kind="stable")
        codes, rows = block_code[order], wanted[order]
        bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), 2 * count]
        spans = list(pairwise(bounds))
        reasons: dict[str, str] = {}
        blocks = self._open([int(codes[first]) for first, _ in spans], reasons)
        sentences = max((opened[2].shape[1] for opened in blocks if opened is not None), default=1)

        tokens = np.zeros((2 * count, self._row_length), dtype=self._dtypes[0])
        tags = np.zeros((2 * count, self._row_length), dtype=np.uint8)
        ends = np.zeros((2 * count, sentences), dtype=np.int64)
        for (first, last), opened in zip(spans, blocks, strict=True):
            if opened is None:
                continue
            lines = rows[first:last]
            # mode "raise" would copy through a buffer; the index, which `_open` compares, keeps lines in range
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
            wrong = {self._key(code): "values outside the allowed range" for code in np.unique(codes[~good]).tolist()}
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

    def _open(self, codes: list[int], reasons: dict[str, str]) -> list[Arrays | None]:
        """Open the arrays of blocks, sorted by data set; `None` for an unreadable block (noted in `reasons`)."""
        blocks: list[Arrays | Exception] = []
        for member, of_member in groupby(codes, lambda code: code >> 40):
            blocks += self._readers[member].read([code & ((1 << 40) - 1) for code in of_member])
        opened: list[Arrays | None] = []
        for code, arrays in zip(codes, blocks, strict=True):
            problem = arrays if isinstance(arrays, Exception) else self._problem(*arrays)
            if problem is not None:
                reasons[self._key(code)] = failure_reason(problem)
            opened.append(None if isinstance(arrays, Exception) or problem is not None else arrays)
        return opened

    def _problem(
        self, tokens: npt.NDArray[Any], tags: npt.NDArray[Any], sentences: npt.NDArray[Any]
    ) -> DataError | None:
        """Return why arrays cannot be the rows of a block, or `None`."""
        width = (self._row_length,)
        if tokens.shape[1:] != width or tags.shape[1:] != width or sentences.ndim != 2 or sentences.shape[1] == 0:
            return DataError(f"arrays of {tokens.shape}, {tags.shape} and {sentences.shape}, not of rows of {width}")
        if (tokens.dtype, tags.dtype, sentences.dtype) != self._dtypes:
            return DataError(f"{tokens.dtype}, {tags.dtype} and {sentences.dtype}, not {self._dtypes}")
        if self._segments and sentences.shape[1] > self._segments:
            return DataError(f"{sentences.shape[1]} segments in a row, not at most {self._segments}")
        return None

    def _check(self, tokens: npt.NDArray[Any], tags: npt.NDArray[np.uint8], ends: Integers) -> npt.NDArray[np.bool_]:
        """Return a mask [N] of the rows with allowed values: a wrong id would break the embedding, on a GPU beyond
        recovery."""
        groups = tags & np.uint8(GROUP_BITS)
        steps = ends[:, 1:] >= ends[:, :-1]
        good = np.ones(len(tokens), dtype=np.bool_)
        if int(tokens.max()) < self._vocab_size and int(groups.max()) < len(GROUPS) and steps.all():  # the usual case
            return good & (ends[:, -1] <= self._row_length)
        good &= tokens.max(axis=1) < self._vocab_size
        good &= groups.max(axis=1) < len(GROUPS)
        good &= steps.all(axis=1)
        return good & (ends[:, -1] <= self._row_length)

    def _key(self, code: int) -> str:
        name = self._names[code >> 40]
        key = self._readers[code >> 40].blocks.keys[code & ((1 << 40) - 1)]
        return f"{name}/{key}" if name else key
