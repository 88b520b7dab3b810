"""What comparing checksums at the first read takes: batches made with --data.verify over batches made without.

    python benchmarks/verify_cost.py --data data/embedded [--rounds 31] [--threads 1]

Text: micro-batches of pos_bert_tiny from all blocks of the data set, opened anew each time. Images: micro-batches of
MAE, one crop of 224 pixels of smooth noise, 500 x 375 as JPEGs. Both in this process; a loader's worker does the same
beside the steps, and a step waits for none of it as long as the workers keep up.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, pair_ratio
from trp_scale.config import Config
from trp_scale.config.loader import load_recipe
from trp_scale.data.index import write_json
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.sharding.binary_index import write_dataset_index
from trp_scale.sharding.job.writing import new_tar, report_path


@dataclass(kw_only=True)
class Options:
    """What is read."""

    data: Path
    """Data set of text, as of trp-scale shard-text --embedded."""
    images: int = 256
    """JPEGs."""
    windows: int = 8
    """Global batches of one measurement."""
    rounds: int = 31
    """Pairs of measurements."""
    threads: int = 1
    """Of torch."""


def make_images(directory: Path, count: int) -> Path:
    """A data set of `count` images."""
    generator = np.random.default_rng(0)
    (directory / "shards").mkdir(parents=True)
    (directory / "progress").mkdir()
    with new_tar(directory / "shards" / "image-000000.tar", report_path(directory, "image-000000.tar")) as tar:
        for number in range(count):
            coarse = generator.integers(0, 256, (47, 63, 3), dtype=np.uint8)
            stream = io.BytesIO()
            Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=80)
            tar.writer.add(f"{number:010d}", 1, {"jpg": stream.getvalue()})
    document: dict[str, object] = {
        "format": 1,
        "kind": "image",
        "shards": ["image-000000.tar"],
        "suffixes": ["jpg"],
        "rows": count,
        "rows_per_block": 8,
        "classes": None,
    }
    write_dataset_index(directory, document)
    write_json(directory / "dataset.json", document)
    return directory


def reading(config: Config, verify: bool, windows: int) -> Callable[[], None]:
    """Reads that many global batches from the beginning, with files opened anew."""

    def read() -> None:
        config.data.verify = verify
        sources = open_sources(config, rank=0, world=1)
        for _ in range(windows):
            sources.train.next_window()
        sources.close()

    return read


def main() -> None:
    """Print both ratios."""
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    text = load_recipe("pos_bert_tiny")
    text.data.path, text.data.workers = str(options.data), 0
    text.batch.micro_size = 32
    with tempfile.TemporaryDirectory() as place:
        images = MaeConfig()
        images.data.path, images.data.workers = str(make_images(Path(place) / "images", options.images)), 0
        images.crops.count, images.crops.size, images.vision.patch_size = 1, 224, 16
        images.batch.global_size = images.batch.micro_size = 32
        for name, config in (("text", text), ("images", images)):
            reads = {each: reading(config, each == "with", options.windows) for each in ("with", "without")}
            measured = alternate(reads, rounds=options.rounds)
            ratio = pair_ratio(measured["with"].cpus, measured["without"].cpus)
            rows = options.windows * config.batch.global_size
            taken = statistics.median(
                one - other for one, other in zip(measured["with"].cpus, measured["without"].cpus, strict=True)
            )
            print(
                f"{name}: processor time with checksums over without: {ratio.median:.4f} "
                f"({ratio.lower:.4f} to {ratio.upper:.4f}), {options.rounds} pairs; {1e6 * taken / rows:.1f} us a row "
                f"of {1e6 * measured['without'].cpu / rows:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
