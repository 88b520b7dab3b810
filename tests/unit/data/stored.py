"""A small stored text data set for tests, written with the standard library alone: random pieces, real structure."""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.settings import changed
from trp_scale.config import Config
from trp_scale.data.index import Block, ShardIndex, StoredMember, write_index, write_json
from trp_scale.data.text.dataset import GROUPS, WORD_START
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
VOCABULARY = 60


def draw_rows(
    rows: int, width: int, generator: np.random.Generator, shortest: int = 1
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Rows of random words of 1 to 3 pieces in sentences of 1 to 6 words: tokens, tags, sentence ends."""
    tokens = np.zeros((rows, width), dtype=np.uint16)
    tags = np.zeros((rows, width), dtype=np.uint8)
    ends = np.zeros((rows, width), dtype=np.uint16)
    for row in range(rows):
        pieces = int(generator.integers(shortest, width + 1))
        tokens[row, :pieces] = generator.integers(5, VOCABULARY, pieces)
        stops, words, place = [], 0, 0
        while place < pieces:
            length = min(int(generator.integers(1, 4)), pieces - place)
            tags[row, place : place + length] = generator.integers(0, len(GROUPS))
            tags[row, place] |= WORD_START
            place, words = place + length, words + 1
            if words >= generator.integers(1, 7):
                stops.append(place)
                words = 0
        if not stops or stops[-1] < pieces:
            stops.append(pieces)
        ends[row, : len(stops)] = stops
        ends[row, len(stops) :] = pieces
    return tokens, tags, ends


def npy(array: npt.NDArray[Any], allow_pickle: bool = False) -> bytes:
    """The content of a .npy file."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def write_shard(
    path: Path, blocks: dict[str, dict[str, bytes]], rows: dict[str, int], labels: dict[str, int] | None = None
) -> None:
    """A tar with its index: `blocks` maps a key to its members' contents by suffix, `labels` to an image's class."""
    entries = []
    with tarfile.open(path, "w") as tar:
        for key, members in blocks.items():
            placed = {}
            for suffix, content in members.items():
                header = tarfile.TarInfo(f"{key}.{suffix}")
                header.size = len(content)
                offset = tar.offset + 512
                tar.addfile(header, io.BytesIO(content))
                placed[suffix] = StoredMember(offset=offset, length=len(content), crc32=zlib.crc32(content))
            entries.append(Block(key=key, rows=rows[key], members=placed, label=(labels or {}).get(key)))
    write_index(path, ShardIndex(shard=path.name, size=path.stat().st_size, blocks=entries))


def write_dataset(
    directory: Path,
    *,
    block_rows: list[list[int]],
    length: int = 24,
    seed: int = 0,
    shortest: int = 1,
    changes: dict[str, object] | None = None,
) -> Path:
    """A data set with one shard per list in `block_rows`, the rows of its blocks; `changes` go into dataset.json."""
    generator = np.random.default_rng(seed)
    shards = directory / "shards"
    shards.mkdir(parents=True)
    names = []
    for number, counts in enumerate(block_rows):
        names.append(f"text-{number:06d}.tar")
        blocks, rows = {}, {}
        for place, count in enumerate(counts):
            key = f"text-{number:06d}-{place:06d}"
            tokens, tags, ends = draw_rows(count, length - 3, generator, shortest)
            blocks[key] = {"tokens.npy": npy(tokens), "tags.npy": npy(tags), "sentences.npy": npy(ends)}
            rows[key] = count
        write_shard(shards / names[-1], blocks, rows)
    document: dict[str, object] = {
        "format": 1,
        "kind": "text",
        "length": length,
        "row_length": length - 3,
        "vocab_size": VOCABULARY,
        "special_tokens": SPECIAL,
        "special_token_ids": sorted(SPECIAL.values()),
        "token_dtype": "uint16",
        "groups": list(GROUPS),
        "rows": sum(map(sum, block_rows)),
        "blocks": sum(map(len, block_rows)),
        "shards": names,
    }
    write_json(directory / "dataset.json", {**document, **(changes or {})})
    return directory


def config_for(path: Path | str, **sections: dict[str, object]) -> Config:
    """A run on `path` in this process, global batch 12 in micro-batches of 3; `sections` change fields by section."""
    config = PosBertConfig()
    config.data.path = str(path)
    config.data.workers = 0
    config.data.validation_fraction = 0.0
    config.data.blocks_per_group = 3
    config.batch.global_size, config.batch.micro_size = 12, 3
    return changed(config, **sections)


def members(rows: int = 2) -> dict[str, bytes]:
    return {
        "tokens.npy": npy(np.full((rows, 21), 7, dtype=np.uint16)),
        "tags.npy": npy(np.full((rows, 21), 0x81, dtype=np.uint8)),
        "sentences.npy": npy(np.array([[5, 21]] * rows, dtype=np.uint16)),
    }


class Trap:
    """Unpickling one creates a file: how a planted pickle would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def dataset_with(directory: Path, **blocks: dict[str, bytes]) -> Path:
    """A data set whose only shard holds `blocks`, of two rows each."""
    write_dataset(directory, block_rows=[[2]])
    write_shard(directory / "shards" / "text-000000.tar", blocks, dict.fromkeys(blocks, 2))
    return directory
