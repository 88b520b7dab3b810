"""Reads stored samples of which one bit is flipped, and prints what became of it: run as a process of its own, which a
decoder in C may end.

python -m tests.unit.data.flipping IMAGES TEXT FLIPS

FLIPS: of each member, and as many again of the first 128 bytes of one: its header.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from tests.unit.data.images.multimodal import maps, multimodal_config
from tests.unit.data.images.source_images import png
from tests.unit.data.stored import config_for
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.data.images.formats import write_png
from trp_scale.data.images.maps import map_formats
from trp_scale.data.index import read_index
from trp_scale.errors import DataError
from trp_scale.finetuning.detection.batch import read_image
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


def decoded(name: str, content: bytes, decode: Callable[[bytes], object], count: int) -> Iterator[tuple[str, str]]:
    """(name, outcome) of a decoder that sees the damage itself, as when it was there before the checksum was taken."""
    for byte, bit in flips(count, len(content), np.random.default_rng(1)):
        yield name, tried(decode, flipped(content, byte, bit))


def tried(decode: Callable[[bytes], object], content: bytes) -> str:
    try:
        decode(content)
    except DataError:
        return "left out"
    except Exception as error:  # what would end a run
        return f"{type(error).__name__}: {error}"
    return "read"


def file_of(content: bytes, folder: str) -> Path:
    path = Path(folder) / "image"
    path.write_bytes(content)
    return path


def main(images: str, text: str, count: int) -> None:
    """Print a list of [what, outcome]."""
    found: list[tuple[str, str]] = []
    for verify in (False, True):
        mode = "verify" if verify else "plain"
        for config in (multimodal_config(images), config_for(text)):
            config.data.verify = verify
            rows = open_sources(config, rank=0, world=1).train.rows
            found += [(f"{mode} {suffix}", what) for suffix, what in stored_members(config, rows, count)]
    size = (40, 50)
    forms = map_formats()
    stored = {name: png(numbers) for name, numbers in zip(("depth", "semseg"), maps(*size, seed=0), strict=True)}
    stored["normals"] = write_png(np.random.default_rng(0).integers(0, 1 << 16, (*size, 3)).astype(np.uint16))
    colours = png(np.asarray(Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)).resize((50, 40))))
    with tempfile.TemporaryDirectory() as folder:
        for name, map_ in stored.items():
            decode = partial(forms[name].decode, size=size)
            found += decoded(f"decoder {forms[name].suffix}", map_, decode, count)
        found += decoded("detection png", colours, lambda content: read_image(file_of(content, folder), size), count)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
