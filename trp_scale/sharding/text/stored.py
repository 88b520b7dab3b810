"""Stored blocks of text read back: their arrays, what `verify` demands of them, and rows for the eye.

Nothing is ever unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from tokenizers import Tokenizer

from trp_scale.data.index import Block, read_index
from trp_scale.data.samples import check_members as check_suffixes
from trp_scale.data.tar_reader import parse_npy
from trp_scale.data.text.dataset import GROUP_BITS, GROUPS, OTHER, SUFFIXES, WORD_START
from trp_scale.data.text.tokenizer import load_for_sharding
from trp_scale.errors import DataError, shorten

STYLES = {
    "verb": "bold red",
    "noun": "blue",
    "adjective": "green",
    "determiner": "yellow",
    "adverb": "magenta",
    "pronoun": "cyan",
    "preposition": "bright_yellow",
    "conjunction": "bright_magenta",
    "interjection": "bold white on red",
    "other": "dim",
}
"""Rich style of each group."""


def read_block(shard: Path, block: Block) -> dict[str, NDArray[Any]]:
    """All arrays of a block by suffix, without checking checksums (`verify` does)."""
    check_suffixes(shard, block.key, set(block.members), SUFFIXES)
    arrays = {}
    with shard.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        for suffix in SUFFIXES:
            member = block.members[suffix]
            where = f"{shard}: block {shorten(block.key)}, {suffix}"
            if member.offset + member.length > size:
                raise DataError(f"{where}: the index is damaged: the member lies outside the tar's {size} bytes")
            stream.seek(member.offset)
            arrays[suffix] = parse_npy(memoryview(stream.read(member.length)), where)
    return arrays


def check_members(shard: Path, block: Block, dataset: dict[str, Any]) -> None:
    """A block has the listed members and no other.

    Raises:
        DataError: naming the member.
    """
    check_suffixes(shard, block.key, set(block.members), SUFFIXES)


def check_contents(
    where: str, places: dict[str, str], contents: dict[str, bytes], block: Block, dataset: dict[str, Any]
) -> None:
    """The arrays of a block must have the form that dataset.json promises.

    Raises:
        DataError: naming `where` (the block), or the place of a member.
    """
    arrays = {suffix: parse_npy(memoryview(content), places[suffix]) for suffix, content in contents.items()}
    shape = (block.rows, dataset["row_length"])
    for suffix, dtype in (("tokens.npy", dataset["token_dtype"]), ("tags.npy", "uint8"), ("sentences.npy", "uint16")):
        array = arrays[suffix]
        wanted = shape if suffix != "sentences.npy" else (block.rows, max(1, array.shape[-1] if array.ndim else 0))
        if array.dtype != np.dtype(dtype) or array.shape != wanted:
            raise DataError(f"{where}, {suffix}: {array.dtype} {array.shape} found, {dtype} {wanted} expected")
    tokens, tags = arrays["tokens.npy"], arrays["tags.npy"]  # [R, row_length]
    ends = arrays["sentences.npy"].astype(np.int64)  # [R, S]
    lengths = ends[:, -1]
    padding = np.arange(shape[1]) >= lengths[:, None]  # [R, row_length]
    checks = (
        (tokens >= dataset["vocab_size"], f"a piece that is not below vocab_size {dataset['vocab_size']}"),
        ((tags & GROUP_BITS >= len(GROUPS)) | (tags & ~np.uint8(GROUP_BITS | WORD_START) != 0), "a tag of no group"),
        ((lengths < 1) | (lengths > shape[1]), f"a row length outside 1-{shape[1]}"),
        ((ends[:, 0] < 1) | (np.diff(ends, axis=1) < 0).any(axis=1), "sentence ends that do not ascend"),
        (padding & (tokens != dataset["special_tokens"]["pad"]), "a piece behind the end of the row"),
        (padding & (tags != OTHER), "a tag behind the end of the row"),
    )
    for wrong, what in checks:
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            raise DataError(f"{where}, row {row}: {what}")


def legend() -> Text:
    """The groups in their colours."""
    return Text(" ").join(Text(group, style=STYLES[group]) for group in GROUPS)


def row_texts(shard: Path, rows: int, key: str | None = None) -> Iterator[tuple[str, Text]]:
    """The first rows of a shard, or of one block of it, as (block and row, text); `|` ends a sentence.

    Raises:
        DataError: no such block, or the shard cannot be read.
    """
    blocks = read_index(shard).blocks  # first: a path that is no shard is named
    tokenizer = load_for_sharding(shard.parent.parent / "tokenizer")
    if key is not None:
        keys = [block.key for block in blocks]
        blocks = [block for block in blocks if block.key == key]
        if not blocks:
            raise DataError(f"{shard}: no block {key!r}; there are {keys[0]} to {keys[-1]}")
    for block in blocks:
        arrays = read_block(shard, block)
        for row in range(min(rows, block.rows)):
            ends = arrays["sentences.npy"][row].tolist()
            pieces = arrays["tokens.npy"][row, : ends[-1]].tolist()
            tags = arrays["tags.npy"][row, : ends[-1]].tolist()
            yield f"{block.key} row {row}", _row_text(tokenizer, pieces, tags, set(ends))
        rows -= min(rows, block.rows)
        if rows == 0:
            return


def _row_text(tokenizer: Tokenizer, pieces: list[int], tags: list[int], ends: set[int]) -> Text:
    text = Text()
    for position, (piece, tag) in enumerate(zip(pieces, tags, strict=True)):
        name = tokenizer.id_to_token(piece) or f"<{piece}>"
        continues = name.startswith("##")
        if position and not continues:
            text.append(" ")
        text.append(name.removeprefix("##") if continues else name, style=STYLES[GROUPS[tag & GROUP_BITS]])
        if position + 1 in ends:
            text.append(" |", style="bold")
    return text
