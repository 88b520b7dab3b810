"""The index of a shard and the description of a data set: small JSON files beside the tars.

DATASET/
  dataset.json                 what was made, from what, and the counts
  tokenizer/                   Hugging Face tokenizer directory
  shards/text-000000.tar       WebDataset tar; one sample = one block of rows
  shards/text-000000.index.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trp_scale.config import RefusedError
from trp_scale.data.temporary import temporary_beside

BINARY_INDEX = "index.bin"
"""One index of all tars of a folder (binary_index.py), beside them."""

INDEX_FORMAT = 2
"""2: with the class of each image."""


class DataError(RefusedError):
    """Stored data is missing, damaged or of another format; the message names the file and the place."""


MOST_OF_A_REASON = 300
"""Characters of an error that are kept: it may quote what a damaged file holds."""


def reason_of(error: Exception) -> str:
    """Why something cannot be read, in one line.

    Raises:
        RefusedError, MemoryError: the error itself, where it is not the file's: of the network, say.
    """
    if isinstance(error, MemoryError) or (isinstance(error, RefusedError) and not isinstance(error, DataError)):
        raise error
    said = " ".join(str(error).split())
    text = said if isinstance(error, DataError) else f"{type(error).__name__}: {said}"
    return text if len(text) <= MOST_OF_A_REASON else f"{text[:MOST_OF_A_REASON]}..."


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member file of a block inside its tar.

    Attributes:
        offset: first byte of the member's content in the tar.
        length: bytes of content.
        crc32: zlib.crc32 of the content.
    """

    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """One WebDataset sample: rows stored together.

    Attributes:
        key: the sample's key in the tar, unique in the data set.
        rows: number of rows.
        members: by suffix without the leading dot, e.g. "tokens.npy".
        label: class number of an image; None if it has none.
    """

    key: str
    rows: int
    members: dict[str, Member]
    label: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """All blocks of one tar, in the order they are stored. `shard` is the tar's file name, `size` its bytes."""

    shard: str
    size: int
    blocks: list[Block]


def index_path(shard: Path) -> Path:
    """text-000000.tar -> text-000000.index.json"""
    return shard.with_suffix(".index.json")


def write_index(shard: Path, index: ShardIndex) -> None:
    """Write the index beside its tar: to a temporary name first, then renamed."""
    document = {"format": INDEX_FORMAT, **asdict(index)}
    write_json(index_path(shard), document)


def read_index(shard: Path) -> ShardIndex:
    """Read the index beside `shard`.

    Raises:
        DataError: the index is missing, not JSON, or of another format.
    """
    path = index_path(shard)
    document = read_index_document(shard)
    try:
        blocks = [
            Block(
                key=block["key"],
                rows=block["rows"],
                members={suffix: Member(**member) for suffix, member in block["members"].items()},
                label=block["label"],
            )
            for block in document["blocks"]
        ]
        return ShardIndex(shard=document["shard"], size=document["size"], blocks=blocks)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a shard index ({type(error).__name__}: {error})") from error


def read_index_document(shard: Path) -> dict[str, Any]:
    """The JSON of the index beside `shard`, for who reads more of them than there is time to make `Block`s for.

    Raises:
        DataError: the index is missing, not JSON, or of another format.
    """
    path = index_path(shard)
    document = read_json(path)
    if document.get("format") != INDEX_FORMAT:
        found = document.get("format")
        raise DataError(f"{path}: format {found!r} found, {INDEX_FORMAT} expected; shard the data again")
    return document


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write sorted, indented JSON so that the file never exists half-written under its name, whoever else writes it."""
    temporary = temporary_beside(path)
    temporary.write_text(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing or is not a JSON object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict):
        raise DataError(f"{path}: a JSON object expected, {type(document).__name__} found")
    return document
