"""Rows of a shard as text with the groups of the tags in colour."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text
from tokenizers import Tokenizer

from trp_scale.data.index import DataError, read_index
from trp_scale.data.text.groups import GROUP_BITS, GROUPS
from trp_scale.data.text.members import read_block
from trp_scale.data.text.tokenizer import load_for_sharding

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
