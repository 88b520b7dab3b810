"""Reads stored samples of which one bit is flipped, and prints what became of it: run as a process of its own, which a
decoder in C may end.

python -m tests.unit.data.flipping IMAGES TEXT FLIPS

FLIPS: of each member, and as many again of the first 128 bytes of one: its header.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.unit.data.images.multimodal import multimodal_config
from tests.unit.data.stored import config_for
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.data.index import read_index
from trp_scale.pretraining.base import open_sources


def flips(count: int, length: int, random: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(byte, bit)"""
    for end in (length, min(length, 128)):
        yield from zip(random.integers(0, end, count).tolist(), random.integers(0, 8, count).tolist(), strict=True)


def flipped(content: bytes, byte: int, bit: int) -> bytes:
    return content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :]


def outcome(key: str, read: Callable[[], Batch]) -> str:
    """read: as if nothing were wrong. left out: that one and no other, by its name."""
    try:
        corrupt = read().corrupt
    except Exception as error:  # what would end a run
        return f"{type(error).__name__}: {error}"
    return {(): "read", (key,): "left out"}.get(tuple(corrupt), f"{corrupt} named, {key} expected")


def stored_members(config: Config, rows: int, count: int) -> Iterator[tuple[str, str]]:
    """(member, outcome) of every member of the first block of each shard, one bit flipped where it lies."""
    random = np.random.default_rng(0)
    for shard in sorted(Path(config.data.path).glob("shards/*.tar")):
        whole = shard.read_bytes()
        block = read_index(shard).blocks[0]
        key = f"{shard.stem}/{block.key}" if config.upstream == "mm_mae" else block.key
        for suffix, member in block.members.items():
            for byte, bit in flips(count, member.length, random):
                shard.write_bytes(flipped(whole, member.offset + byte, bit))
                yield suffix, outcome(key, lambda: open_sources(config, rank=0, world=1).train.first_rows(rows))
        shard.write_bytes(whole)


def outcomes(images: str, text: str, count: int) -> list[tuple[str, str]]:
    """(mode and member, outcome) of every flip, with and without checksums."""
    found: list[tuple[str, str]] = []
    for verify in (False, True):
        mode = "verify" if verify else "plain"
        for config in (multimodal_config(images), config_for(text)):
            config.data.verify = verify
            rows = open_sources(config, rank=0, world=1).train.rows
            found += [(f"{mode} {suffix}", what) for suffix, what in stored_members(config, rows, count)]
    return found


if __name__ == "__main__":
    json.dump(outcomes(sys.argv[1], sys.argv[2], int(sys.argv[3])), sys.stdout)
