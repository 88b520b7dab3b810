"""One flipped bit in what is stored: the sample is read or left out by its name, and the run goes on.

A decoder in C may end its process, so all flips are tried in a process of their own:

python -m tests.unit.data.test_flipped_bits IMAGES TEXT FLIPS

FLIPS: of each member, and as many again of the first 128 bytes of one: its header.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.runs import ROOT, flags, image_flags, lines, pretrain_here
from tests.unit.data.images.multimodal import SUFFIXES, multimodal_config, sample, write_multimodal
from tests.unit.data.stored import config_for, write_dataset
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.data.index import read_index
from trp_scale.pretraining.base import open_sources

ARRAYS = ["tokens.npy", "tags.npy", "sentences.npy"]


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


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Images with maps, and text."""
    place = tmp_path_factory.mktemp("flips")
    images = write_multimodal(place / "images", [[sample(number, 24, 30) for number in range(3)]])
    text = write_dataset(place / "text", block_rows=[[5, 4]])
    return str(images), str(text)


def count(found: Iterable[Sequence[str]]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for name, what in found:
        counts.setdefault(name, Counter())[what] += 1
    return counts


@pytest.mark.exhaustive
def test_nothing_else_happens_to_any_kind_of_member(stored: tuple[str, str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.unit.data.test_flipped_bits", *stored, "32"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, f"a decoder ended the process: {found.returncode}\n{found.stderr[-4000:]}"
    counted = count(json.loads(found.stdout))
    assert counted.keys() == {f"{mode} {suffix}" for mode in ("plain", "verify") for suffix in SUFFIXES + ARRAYS}
    for name, counts in counted.items():
        if name.endswith(" cls"):
            assert counts.keys() == {"read"}, "the class stands in the index; its member is for other readers"
            continue
        assert counts.keys() <= {"read", "left out"}, name
        assert counts["left out"] > 0, f"{name}: no flip that a decoder can see was tried"


def test_what_has_its_checksum_compared_is_always_found(stored: tuple[str, str]) -> None:
    """Few flips, in this process."""
    counts = count(outcomes(*stored, 4))
    compared = {"plain depth.png", "plain semseg.png", *(f"verify {name}" for name in SUFFIXES + ARRAYS)}
    for name in compared - {"verify cls"}:
        assert counts[name].keys() == {"left out"}, name


def flip_in_first_block(shard: Path, suffix: str, byte: int) -> str:
    """Flip a bit of a member; returns the block's key."""
    block = read_index(shard).blocks[0]
    shard.write_bytes(flipped(shard.read_bytes(), block.members[suffix].offset + byte, 2))
    return block.key


def goes_on_without(keys: list[str], run_dir: Path, steps: int, printed: str) -> None:
    """All steps were made, and each key is named once by the display and kept in the checkpoint."""
    assert len(lines(run_dir)) == steps
    for key in keys:
        assert printed.count(f"block {key} ") == 1
    assert read_document(checkpoint_path(run_dir, steps)).extra["corrupt"] == keys


def test_a_run_leaves_flipped_maps_and_images_out_and_goes_on(
    image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a worker, as a run reads: a decoder that ends its process ends the run, and the same run again and again."""
    data = shutil.copytree(image_dataset, tmp_path / "images")
    shards = sorted(data.glob("shards/*.tar"))
    damage = zip(shards, (("depth.png", 60), ("semseg.png", 60), ("jpg", 1)), strict=True)
    keys = [f"{shard.stem}/{flip_in_first_block(shard, *where)}" for shard, where in damage]
    changes = {"data__workers": 1, "data__validation_fraction": 0.0, "data__max_corrupt_blocks": 3}
    arguments = image_flags("mm_mae_tiny", data, tmp_path / "run", training__steps=12, **changes)  # 96 images
    arguments += ["--modalities.visible_tokens", "10"]
    assert pretrain_here(arguments) == 0
    goes_on_without(keys, tmp_path / "run", 12, capsys.readouterr().out)


def test_a_run_leaves_a_flipped_header_of_text_out_and_goes_on(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(text_dataset, tmp_path / "text")
    shard = min(data.glob("shards/*.tar"))
    header_end = shard.read_bytes().index(b"}") - read_index(shard).blocks[0].members["tokens.npy"].offset
    key = flip_in_first_block(shard, "tokens.npy", header_end)
    steps = -(-json.loads((data / "dataset.json").read_text())["rows"] // 32)
    changes = {"data__workers": 1, "data__validation_fraction": 0.0, "data__max_corrupt_blocks": 1}
    changes |= {"validation__every": 0, "batch__global_size": 32, "batch__micro_size": 32, "training__steps": steps}
    assert pretrain_here(flags(data, tmp_path / "run", **changes)) == 0
    goes_on_without([key], tmp_path / "run", steps, capsys.readouterr().out)


if __name__ == "__main__":
    json.dump(outcomes(sys.argv[1], sys.argv[2], int(sys.argv[3])), sys.stdout)
