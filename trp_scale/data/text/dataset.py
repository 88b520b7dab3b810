"""A stored text data set: what dataset.json says, and its blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trp_scale.config.schema import Fields, Whole
from trp_scale.data.binary_index import OrderBlocks
from trp_scale.data.index import read_fields
from trp_scale.data.raw_files import require_dataset
from trp_scale.data.samples import SampleTable, read_samples
from trp_scale.data.stores.tars import StoredPart, TarStore
from trp_scale.errors import DataError, quote

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
"""Group names; the position is the number stored in shards. The last one is outside the nine."""

OTHER = GROUPS.index("other")

WORD_START = 0x80
"""Bit set in a stored tag byte on the first piece of each word; the low four bits are the group."""

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
    """Number of the group of a Penn tag; tags outside the nine groups are `other`."""
    return PENN_TO_GROUP.get(penn_tag, OTHER)


FORMAT = 1
SUFFIXES = ("tokens.npy", "tags.npy", "sentences.npy")
"""Members of a text block. tokens [R, P] uint16 or uint32, tags [R, P] uint8, sentences [R, S] uint16."""

LONGEST = 1 << 16
"""Pieces of a sequence: ends of sentences are stored in 16 bits."""

_SPECIAL = ("pad", "unk", "cls", "sep", "mask")


@dataclass(frozen=True, kw_only=True)
class TextMeta:
    """Properties that all rows of a text source share; mixed data sets must agree on all but the directories.

    Attributes:
        length: pieces of a finished sequence, [CLS] and both [SEP] included.
        row_length: pieces stored per row, length - 3.
        vocab_size: number of token ids.
        token_dtype: numpy type of stored tokens, uint16 or uint32.
        special_tokens: ids of pad, unk, cls, sep and mask.
        special_token_ids: ids that a random replacement never takes.
        groups: names of the groups in the tags.
        tokenizer_digest: hash of the tokenizer directory's content ("" when there is none).
        tokenizer_directories: Hugging Face tokenizer directory of each member, in the order of `data.path`.
    """

    length: int
    row_length: int
    vocab_size: int
    token_dtype: str
    special_tokens: dict[str, int]
    special_token_ids: tuple[int, ...]
    groups: tuple[str, ...]
    tokenizer_digest: str
    tokenizer_directories: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """One opened data set.

    Attributes:
        name: "" unless it is a member of a mixture.
        meta: what its rows have in common.
        samples: the stored blocks.
        blocks: what order and split see of them.
    """

    name: str
    meta: TextMeta
    samples: SampleTable
    blocks: OrderBlocks

    def digest(self) -> str:
        """Equal on two ranks if they see the same dataset.json, tokenizer, indexes and tar sizes."""
        parts = (self.name, self.meta.length, self.meta.vocab_size, self.meta.special_tokens)
        return f"{parts} {self.meta.tokenizer_digest} {self.samples.digest}"

    def tars(self, block: int) -> list[tuple[TarStore, StoredPart]]:
        """The tar that holds a block, or the part of it that the cache holds, with its store."""
        return [(self.samples.store, self.samples.stored_part(range(block, block + 1)))]


def open_text_dataset(directory: Path, name: str = "") -> TextDataset:
    """Read dataset.json and all indexes.

    Raises:
        DataError: something is missing or of another format, or the tars differ from their indexes.
    """
    require_dataset(directory)
    fields = read_fields(directory / "dataset.json", "shard the data again")
    meta = _read_meta(directory, fields)
    samples, blocks = read_samples(directory / "shards", fields.file_names("shards"), SUFFIXES, None)
    return TextDataset(
        name=name,
        meta=meta,
        samples=samples,
        blocks=blocks,
    )


def agree(datasets: list[TextDataset]) -> TextMeta:
    """The meta data of a mixture.

    Raises:
        DataError: two members differ in something that every row must share; both values are named.
    """
    first = datasets[0]
    for other in datasets[1:]:
        if first.meta.tokenizer_digest != other.meta.tokenizer_digest:
            raise DataError(
                f"data.path: members of a mixture must have one tokenizer, and {first.name} and {other.name} have each "
                f"its own; shard one of them again, with --tokenizer {first.meta.tokenizer_directories[0]} or "
                f"{other.meta.tokenizer_directories[0]}"
            )
        for field in (
            "length",
            "row_length",
            "vocab_size",
            "token_dtype",
            "special_tokens",
            "special_token_ids",
            "groups",
        ):
            ours, theirs = getattr(first.meta, field), getattr(other.meta, field)
            if ours != theirs:
                raise DataError(
                    f"data.path: members of a mixture must have the same {field}: "
                    f"{first.name} has {ours!r}, {other.name} has {theirs!r}"
                )
    directories = tuple(path for dataset in datasets for path in dataset.meta.tokenizer_directories)
    return TextMeta(**{**first.meta.__dict__, "tokenizer_directories": directories})


def _read_meta(directory: Path, fields: Fields) -> TextMeta:
    for field, expected in (("format", FORMAT), ("kind", "text")):
        if (stored := fields.document.get(field)) != expected:
            raise fields.refusal(f"{field} {quote(stored)} found, {expected!r} expected")
    length, row_length = fields.whole("length"), fields.whole("row_length")
    if row_length != length - 3 or row_length < 1:
        raise fields.refusal(f"row_length {row_length} found, length - 3 = {length - 3} expected")
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
        vocab_size=fields.whole("vocab_size", least=1),
        token_dtype=fields.take("token_dtype", Literal["uint16", "uint32"]),
        special_tokens={name: special[name] for name in _SPECIAL},
        special_token_ids=tuple(sorted(fields.take("special_token_ids", list[Whole]))),
        groups=groups,
        tokenizer_digest=tokenizer_digest(directory / "tokenizer"),
        tokenizer_directories=(directory / "tokenizer",),
    )


def tokenizer_digest(directory: Path) -> str:
    """Hash of the vocabulary file, the one file of a Hugging Face tokenizer that decides what ids mean; "" without
    one."""
    for name in ("tokenizer.json", "vocab.txt"):
        if (directory / name).is_file():
            return hashlib.blake2b((directory / name).read_bytes(), digest_size=16).hexdigest()
    return ""
