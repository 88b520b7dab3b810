"""Data sets and a checkpoint that commit 6835c1b wrote (tests/frozen) stay readable, and are written alike today."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.runs import flags, lines, pretrain_here
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.text.dataset import open_text_dataset
from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text
from trp_scale.sharding.verify import verify_dataset

FROZEN = Path(__file__).parents[1] / "frozen"
DIGESTS = json.loads((FROZEN / "digests.json").read_text(encoding="utf-8"))
"""Digests by which a resumed run recognises its data."""


@pytest.mark.parametrize("name", ["text", "images", "photos"])
def test_a_data_set_is_read_and_recognised(name: str) -> None:
    directory = FROZEN / name
    verify_dataset(directory)
    dataset = open_text_dataset(directory) if name == "text" else open_image_dataset(directory)
    assert dataset.digest() == DIGESTS[name]


def assert_same_files(directory: Path, frozen: Path) -> None:
    names = sorted(str(path.relative_to(frozen)) for path in frozen.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    for name in names:
        assert (directory / name).read_bytes() == (frozen / name).read_bytes(), name


def test_text_is_sharded_into_the_same_bytes(tmp_path: Path) -> None:
    source = shutil.copy(FROZEN / "text.jsonl", tmp_path / "text.jsonl")
    settings = {"length": 32, "vocab_size": 300, "rows_per_block": 8, "shard_bytes": 4000}
    shard_text(
        ShardTextConfig(
            inputs=[str(source)], output=tmp_path / "text", tagger="textblob", processes=1, progress=False, **settings
        )
    )
    assert_same_files(tmp_path / "text", FROZEN / "text")


def test_images_are_sharded_into_the_same_bytes(tmp_path: Path) -> None:
    for path in sorted((FROZEN / "images" / "shards").glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    number = int("".join(filter(str.isdigit, Path(member.name).stem)))
                    file = tmp_path / "source" / f"class_{number % 2}" / f"{number:03d}.jpg"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    content = tar.extractfile(member)
                    assert content is not None
                    file.write_bytes(content.read())
    shard_images(
        ShardImagesConfig(
            inputs=[str(tmp_path / "source")],
            output=tmp_path / "photos",
            samples_per_shard=5,
            rows_per_block=2,
            processes=1,
            progress=False,
        )
    )
    assert_same_files(tmp_path / "photos", FROZEN / "photos")


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir) if "step" in line and "loss" in line]


def test_a_run_continues_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: the state of the random generators is read too."""
    shutil.copytree(FROZEN / "text", tmp_path / "text")
    shutil.copytree(FROZEN / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    small = {"model__max_positions": 32, "model__layers": 1, "model__dropout": 0.1, "checkpoint__every": 3}
    assert pretrain_here(flags(Path("text"), Path("run"), training__steps=6, checkpoint__keep=5, **small)) == 0
    expected = [line for line in steps(FROZEN / "run") if line["step"] > 3]
    continued = [line for line in steps(tmp_path / "run") if line["step"] > 3]
    assert [line["step"] for line in continued] == [4, 5, 6]
    for line, reference in zip(continued, expected, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
