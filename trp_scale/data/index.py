"""JSON index of a shard and description of a data set.

DATASET/
  dataset.json                 settings, sources and counts
  tokenizer/                   Hugging Face tokenizer directory
  shards/text-000000.tar       WebDataset tar; one sample = one block of rows
  shards/text-000000.index.json
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trp_scale.config.files import LARGEST_INDEX, parse_json, read_content, read_object
from trp_scale.config.schema import Fields, Whole, record
from trp_scale.errors import DataError, RefusedError, can_be_written, quote, shorten
from trp_scale.storage import files

BINARY_INDEX = "index.bin"
"""Name of the binary index of all tars of a folder (binary_index.py)."""

INDEX_FORMAT = 2
"""Format 2 holds the class of each image."""


MAX_REASON_LENGTH = 300
"""Characters of an error message that are kept: it may quote a damaged file."""


def failure_reason(error: Exception) -> str:
    """Return the reason of a read error in one line.

    Raises:
        RefusedError, MemoryError: `error` itself, if the file is not its cause.
    """
    if isinstance(error, MemoryError) or (isinstance(error, RefusedError) and not isinstance(error, DataError)):
        raise error
    message = " ".join(str(error).split())
    text = message if isinstance(error, DataError) else f"{type(error).__name__}: {message}"
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}..."


@dataclass(frozen=True, kw_only=True)
class StoredMember:
    """Member file of a block inside its tar.

    Attributes:
        offset: first byte of the content in the tar.
        length: bytes of the content.
        crc32: zlib.crc32 of the content.
    """

    offset: Whole
    length: Whole
    crc32: Whole


@dataclass(frozen=True, kw_only=True)
class Block:
    """WebDataset sample: rows that are stored together.

    Attributes:
        key: key of the sample in the tar, unique in the data set.
        rows: number of rows.
        members: by suffix without the leading dot, such as "tokens.npy".
        label: class of an image; `None` if it has none.
    """

    key: str
    rows: Whole
    members: dict[str, StoredMember]
    label: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """All blocks of one tar in stored order. `shard` is the tar's file name, `size` its bytes."""

    shard: str
    size: int
    blocks: list[Block]


def index_path(shard: Path) -> Path:
    """text-000000.tar -> text-000000.index.json"""
    return shard.with_suffix(".index.json")


def write_index(shard: Path, index: ShardIndex) -> None:
    """Write the index of a tar atomically."""
    document = {"format": INDEX_FORMAT, **asdict(index)}
    write_json(index_path(shard), document)


def read_index(shard: Path) -> ShardIndex:
    """Read the index of a tar.

    Raises:
        DataError: the index is missing, not JSON, or has another format.
    """
    index = read_index_document(shard)
    return ShardIndex(shard=index.shard, size=index.size, blocks=[_block(index.path, block) for block in index.blocks])


@dataclass(frozen=True, kw_only=True)
class IndexDocument:
    """JSON index of one tar with unchecked blocks: creating `Block`s of all indexes would take too long.

    Attributes:
        path: path of the index.
        shard, size: as in `ShardIndex`.
        blocks: unchecked objects; `refusal` names an invalid one.
        fields: the whole document.
    """

    path: Path
    shard: str
    size: int
    blocks: list[dict[str, Any]]
    fields: Fields

    def keys(self) -> list[str]:
        """Return the keys of all blocks.

        Raises:
            DataError: a block has no key.
        """
        keys = [block.get("key") for block in self.blocks]
        try:
            "\n".join(keys).encode()  # type: ignore[arg-type]  # raises for other types
        except (TypeError, UnicodeEncodeError):
            raise self.refusal() from None
        return keys  # type: ignore[return-value]

    def check_blocks(self) -> None:
        """Check the fields of every block and their types.

        Raises:
            DataError: a block is invalid.
        """
        for block in self.blocks:
            _block(self.path, block)

    def refusal(self) -> DataError:
        """Return the error that names the first invalid block."""
        try:
            self.check_blocks()
        except DataError as error:
            return error
        return DataError(f"{self.path}: not the index of a shard; shard the data again")


def _block_name(block: dict[str, Any]) -> str:
    """Key of a block, for messages."""
    key = block.get("key")
    return shorten(key) if isinstance(key, str) and can_be_written(key) else quote(key)


def _block(path: Path, block: dict[str, Any]) -> Block:
    where = f"{path}: block {_block_name(block)}"
    return record(Block, block, where, DataError, "shard the data again")


def read_index_document(shard: Path) -> IndexDocument:
    """Read the JSON index of a tar without checking its blocks.

    Raises:
        DataError: the index is missing, not JSON, or has another format.
    """
    path = index_path(shard)
    content = read_content(path, DataError, largest=LARGEST_INDEX)
    fields = Fields(parse_json(content, str(path), DataError, check_limits=False), str(path), DataError)
    if (stored_format := fields.document.get("format")) != INDEX_FORMAT:
        raise DataError(f"{path}: format {quote(stored_format)} found, {INDEX_FORMAT} expected; shard the data again")
    blocks = fields.take("blocks", list)
    if not all(type(block) is dict for block in blocks):
        raise DataError(f"{path}: a block is not an object; shard the data again")
    return IndexDocument(path=path, shard=fields.text("shard"), size=fields.whole("size"), blocks=blocks, fields=fields)


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write sorted JSON, so that equal documents have equal bytes."""
    files.write_json(path, document, sort_keys=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing or is not a JSON object.
    """
    return read_object(path, DataError)


def read_fields(path: Path, advice: str = "") -> Fields:
    """Read a JSON object; `Fields` checks each field on access.

    Args:
        advice: advice for messages about a wrong field.

    Raises:
        DataError: the file is missing or is not a JSON object.
    """
    return Fields(read_json(path), str(path), DataError, advice)
