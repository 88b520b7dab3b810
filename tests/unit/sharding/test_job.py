"""The bytes of a data set do not depend on its number of parts, nor on a killed part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.sharding.test_parts import ROOT, content, image_part, text_part
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.verify import merge


def test_text_in_parts_in_any_order_is_the_same_data_set(text_dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "data"
    for index in (2, 0, 1):
        text_part(text_dataset, output, index)
        assert not (output / "dataset.json").exists()
    merge(output)
    assert content(output) == content(text_dataset)
    merge(output)
    text_part(text_dataset, output, 1)  # of a finished data set nothing is left to do
    assert content(output) == content(text_dataset)


def test_skipped_images_are_counted_once_however_many_parts_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    image_part(tmp_path / "made", 0, 1, count=24, coco=True)
    folder.mkdir()
    for image in (tmp_path / "made" / "images").iterdir():
        image.rename(folder / image.name)
    for name, stored in (("empty.jpg", b""), ("broken.jpg", b"no image"), ("scene-00000000.jpg", b"a second name")):
        (folder / name).write_bytes(stored)
    of_scenes = {name: getattr(ShardImagesConfig, name) for name in ("count", "size", "seed")}
    changes = {"embedded": False, "inputs": [str(folder)], "max_skipped": 0.5, **of_scenes}
    image_part(tmp_path / "one", 0, 1, **changes)
    for index in range(3):
        image_part(tmp_path / "parts", index, **changes)
    with pytest.raises(DataError, match=r"--max_skipped 0\.01"):
        merge(tmp_path / "parts", max_skipped=0.01)
    merge(tmp_path / "parts")
    assert content(tmp_path / "parts") == content(tmp_path / "one")
    assert sum(read_json(tmp_path / "parts" / "dataset.json")["skipped"].values()) == 4


def test_a_killed_part_is_run_again(text_dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "data"
    command = [*text_command(text_dataset, output), "--shard_index", "0", "--num_shards", "2"]
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    first = output / "shards" / "text-000000.index.json"
    deadline = time.monotonic() + 120
    while not first.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    (output / "shards" / ".text-000002.tar.elsewhere-1-0.tmp").write_bytes(b"half of one, of a host that was lost")
    kept = first.with_name("text-000000.tar").stat().st_mtime_ns
    text_part(text_dataset, output, 1, 2)
    with pytest.raises(DataError, match=r"1 of 2 parts are missing.*\n  --shard_index 0 --num_shards 2 \(unfinished"):
        merge(output)
    text_part(text_dataset, output, 0, 2)
    assert first.with_name("text-000000.tar").stat().st_mtime_ns == kept
    merge(output)
    assert content(output) == content(text_dataset)


def text_command(text: Path, output: Path) -> list[str]:
    """Return the command line of `text_part`."""
    command = [sys.executable, "-m", "trp_scale", "shard-text", "--inputs", str(text.with_suffix(".jsonl"))]
    command += ["--output", str(output), "--tagger", "textblob", "--length", "64", "--vocab_size", "1000"]
    return [*command, "--rows_per_block", "16", "--shard_bytes", "20000", "--processes", "1"]
