"""The bytes of a data set do not depend on its number of parts, nor on a killed part; --source_field gives one data set
for each source, with one tokenizer, and the mixture of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import small_text_config
from tests.unit.sharding.test_parts import ROOT, content, image_part, text_part
from trp_scale.data.index import read_json
from trp_scale.data.mixture import parse_paths
from trp_scale.errors import DataError
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.images.shard import shard_images
from trp_scale.sharding.job import MIXTURE
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text
from trp_scale.sharding.verify import merge


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


TEXTS = {"books": ["A cat sat on the mat. It slept."] * 6, "wiki news": ["Dogs bark at night. They ran away."] * 2}


def config(inputs: Path, output: Path, field: str) -> ShardTextConfig:
    return small_text_config(inputs, output, source_field=field, vocab_size=100, length=32)


def write_lines(path: Path, *further: dict[str, object]) -> Path:
    lines = [{"text": text, "site": site} for site, texts in TEXTS.items() for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *further)))
    return path


def documents(output: Path) -> dict[str, int]:
    return {
        member.name: read_json(member.path / "dataset.json")["documents"]
        for member in parse_paths((output / MIXTURE).read_text())
    }


def test_a_field_of_json_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "all.jsonl", {"text": "Nobody knows."}, {"text": "A list.", "site": [1]})
    with caplog.at_level(logging.WARNING, "trp_scale.sharding"):
        shard_text(config(path, tmp_path / "data", "site"))
    assert documents(tmp_path / "data") == {"books": 6, "wiki_news": 2}
    assert "2 documents" in caplog.text and f"{path}:9" in caplog.text
    weights = {member.name: float(member.weight) for member in parse_paths((tmp_path / "data" / MIXTURE).read_text())}
    rows = {name: read_json(tmp_path / "data" / name / "dataset.json")["rows"] for name in weights}
    assert weights == {name: round(1000 * count / sum(rows.values())) for name, count in rows.items()}
    tokenizers = {(tmp_path / "data" / name / "tokenizer" / "tokenizer.json").read_bytes() for name in weights}
    assert len(tokenizers) == 1
    assert sorted(entry.name for entry in (tmp_path / "data").iterdir()) == [
        "books",
        MIXTURE,
        "tokenizer",
        "wiki_news",
    ]
    before = (tmp_path / "data" / "books" / "dataset.json").stat().st_mtime_ns
    shard_text(config(path, tmp_path / "data", "site"))  # finished: nothing changes
    assert (tmp_path / "data" / "books" / "dataset.json").stat().st_mtime_ns == before


def test_folders_of_text(tmp_path: Path) -> None:
    for site, texts in TEXTS.items():
        (tmp_path / "in" / site).mkdir(parents=True)
        for number, text in enumerate(texts):
            (tmp_path / "in" / site / f"{number}.txt").write_text(text)
    shard_text(config(tmp_path / "in", tmp_path / "data", "folder"))
    assert documents(tmp_path / "data") == {"books": 6, "wiki_news": 2}


def test_folders_of_images(tmp_path: Path) -> None:
    for camera, count in (("left", 3), ("right", 5)):
        for number in range(count):
            for kind in ("images", "depth"):
                folder = tmp_path / kind / camera / ("cat" if number % 2 else "dog")
                folder.mkdir(parents=True, exist_ok=True)
                pixels = np.full((16, 16), 100 + number, np.uint16 if kind == "depth" else np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    output = shard_images(
        ShardImagesConfig(
            inputs=[str(tmp_path / "images")],
            output=tmp_path / "data",
            source_field="folder",
            modality=[f"depth={tmp_path / 'depth'}"],
            processes=1,
            progress=False,
        )
    )
    members = parse_paths((output / MIXTURE).read_text())
    assert [(member.name, int(member.weight)) for member in members] == [("left", 375), ("right", 625)]
    stored = [read_json(member.path / "dataset.json") for member in members]
    assert [document["rows"] for document in stored] == [3, 5]
    assert all(document["classes"] == ["cat", "dog"] and "depth" in document["modalities"] for document in stored)


def test_refusals_name_the_flag(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "all.jsonl")
    (tmp_path / "plain.txt").write_text("Some text.")
    for inputs, field in ((path, "nothing"), (path, "folder"), (tmp_path / "plain.txt", "site")):
        with pytest.raises(DataError, match=f"--source_field {field}"):
            shard_text(config(inputs, tmp_path / "data", field))
    same = write_lines(tmp_path / "same.jsonl", {"text": "More.", "site": "wiki_news"})
    with pytest.raises(DataError, match="wiki_news"):
        shard_text(config(same, tmp_path / "other", "site"))
    with pytest.raises(DataError, match="--source_field"):
        shard_text(ShardTextConfig(embedded=True, output=tmp_path / "x", source_field="site"))
