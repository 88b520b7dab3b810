"""Small data sets for tests, made from English that every CPython carries."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images
from trp_scale.sharding.text.corpus import embedded_documents
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text


def small_text_config(source: Path, output: Path, **changes: Any) -> ShardTextConfig:
    """Settings of `small_text_dataset`."""
    config = ShardTextConfig(
        inputs=[str(source)],
        output=output,
        tagger="textblob",
        length=64,
        vocab_size=1000,
        rows_per_block=16,
        shard_bytes=20_000,
        processes=1,
        progress=False,
    )
    return replace(config, **changes)


def small_text_dataset(directory: Path, characters: int = 80_000, **changes: Any) -> Path:
    """Write a data set of a few hundred rows in several shards and blocks, always the same; takes about 3 s.

    Args:
        directory: the data set's directory, which is returned; its input is written beside it.
        characters: how much text is taken.
        changes: of `small_text_config`.
    """
    source = directory.with_name(f"{directory.name}.jsonl")
    source.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    left = characters
    for _, text in embedded_documents():
        lines.append(json.dumps({"text": text[: min(left, 8000)]}) + "\n")
        left -= min(left, 8000, len(text))
        if left <= 0:
            break
    source.write_text("".join(lines), encoding="utf-8")
    return shard_text(small_text_config(source, directory, **changes))


def small_image_config(output: Path, **changes: Any) -> ShardImagesConfig:
    """Settings of `small_image_dataset`."""
    config = ShardImagesConfig(
        output=output,
        embedded=True,
        count=96,
        size=32,
        rows_per_block=8,
        samples_per_shard=32,
        processes=1,
        progress=False,
    )
    return replace(config, **changes)


def copy_dataset(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a data set; `changes` replace fields of its dataset.json, in objects the given fields alone."""
    shutil.copytree(source, target)
    path = target / "dataset.json"
    document = json.loads(path.read_text(encoding="utf-8"))

    def update(fields: dict[str, Any], new: dict[str, Any]) -> None:
        for name, value in new.items():
            if isinstance(value, dict) and isinstance(fields.get(name), dict):
                update(fields[name], value)
            else:
                fields[name] = value

    update(document, changes)
    path.write_text(json.dumps(document), encoding="utf-8")
    return target


def small_image_dataset(directory: Path, **changes: Any) -> Path:
    """Write 96 rendered scenes of 32 x 32 pixels in shards of 32, order-blocks of 8, into `directory`, which is
    returned; takes about 1 s.

    Members of each sample: jpg, cls (eight classes, number % 8), depth.png, semseg.png.
    """
    return shard_images(small_image_config(directory, **changes))
