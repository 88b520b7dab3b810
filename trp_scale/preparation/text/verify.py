"""What the arrays of a text block must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trp_scale.data.index import Block, DataError
from trp_scale.data.text.groups import GROUP_BITS, GROUPS, OTHER, WORD_START
from trp_scale.data.text.members import check_suffixes, parse_array


def check_members(shard: Path, block: Block, dataset: dict[str, Any]) -> None:
    """A block has the listed members and no other.

    Raises:
        DataError: naming the member.
    """
    check_suffixes(shard, block)


def check_contents(
    where: str, places: dict[str, str], contents: dict[str, bytes], block: Block, dataset: dict[str, Any]
) -> None:
    """The arrays of a block must have the form that dataset.json promises.

    Raises:
        DataError: naming `where` (the block), or the place of a member.
    """
    arrays = {suffix: parse_array(places[suffix], content) for suffix, content in contents.items()}
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
