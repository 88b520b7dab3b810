"""Reading through the cache of remote tars: over a local disk, and what it has of a data set that is larger than it.

    python benchmarks/remote_cache.py [--images 8000] [--shards 200] [--share 0.4] [--rounds 15]

The first part reads the members of all images in the order of an epoch, without decoding, from a local data set and
through a warm cache, with the tars opened anew each time: the ratio of pairs of readings in alternating rounds.

The second part uploads the data set to moto's S3 server on this machine, and makes one epoch of MAE's batches of it in
two loader workers, for each way of fetching with an empty cache that may take `share` of the data: what was found and
fetched, and the bytes. The server answers after `delay` seconds, as one that is far away does. Seconds of waiting are
of this machine alone.

Images are noise, as JPEGs of about 20 kB. The cache holds whole tars or single blocks, which TRP_SCALE_CACHE_PARTS
chooses: blocks, if nothing is set, as it cannot hold the data.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, pair_ratio
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.images.reader import SampleReader
from trp_scale.data.index import write_json
from trp_scale.data.plan import Member, TrainPlan
from trp_scale.data.stores.mirror import local_directory
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.sharding.binary_index import write_dataset_index
from trp_scale.sharding.job.writing import new_tar, report_path
from trp_scale.storage.cache import CacheUse

BUCKET = "benchmark"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
WAYS = {
    "whole tars": {"TRP_SCALE_CACHE_PARTS": "never", "TRP_SCALE_TARS_AHEAD": "0"},
    "whole tars, fetched ahead": {"TRP_SCALE_CACHE_PARTS": "never"},
    "blocks": {"TRP_SCALE_TARS_AHEAD": "0"},
    "blocks, fetched ahead": {},
}
"""Ways of fetching, and the environment of each."""


@dataclass(kw_only=True)
class Options:
    """The data set, and what is read."""

    images: int = 8000
    """In all tars."""
    shards: int = 200
    """Tars."""
    rows_per_block: int = 10
    """Images of a block."""
    share: float = 0.4
    """Of the data that the cache may hold, in the second part."""
    delay: float = 0.02
    """Seconds before the server answers a request."""
    rounds: int = 15
    """Of the first part; 0 leaves it out."""
    one_run: str = ""
    """URL of the data set: one run of the second part, which the script starts itself."""


def make(directory: Path, options: Options) -> Path:
    """The data set."""
    generator = np.random.default_rng(0)
    names = [f"image-{number:06d}.tar" for number in range(options.shards)]
    (directory / "shards").mkdir(parents=True)
    (directory / "progress").mkdir()
    each = options.images // options.shards
    for number, name in enumerate(names):
        with new_tar(directory / "shards" / name, report_path(directory, name)) as tar:
            for place in range(each):
                coarse = generator.integers(0, 256, (100, 100, 3), dtype=np.uint8)
                stream = io.BytesIO()
                Image.fromarray(coarse).resize((200, 200), Image.Resampling.BICUBIC).save(stream, "JPEG")
                tar.writer.add(f"{number:04d}{place:06d}", 1, {"jpg": stream.getvalue()})
    document: dict[str, object] = {
        "format": 1,
        "kind": "image",
        "shards": names,
        "suffixes": ["jpg"],
        "rows": each * options.shards,
        "rows_per_block": options.rows_per_block,
        "classes": None,
    }
    write_dataset_index(directory, document)
    write_json(directory / "dataset.json", document)
    return directory


def order(dataset: ImageDataset) -> list[int]:
    """Numbers of the images in the order of an epoch."""
    blocks = dataset.blocks
    chosen = np.ones(len(blocks.rows), dtype=np.bool_)
    plan = TrainPlan(
        seed=0, members=[Member(name="", weight=Fraction(1), table=blocks, chosen=chosen)], blocks_per_group=16
    )
    addresses = plan.locate(np.arange(plan.rows))
    found: list[int] = (blocks.first[addresses.block] + addresses.row).tolist()
    return found


def compare_with_disk(directory: Path, rounds: int) -> None:
    """Print the time through a warm cache over that from the directory itself."""
    numbers = order(open_image_dataset(directory))
    tables = {
        "disk": open_image_dataset(directory).samples,
        "cache": open_image_dataset(local_directory(f"file://{directory}")).samples,
    }

    def read(name: str) -> None:
        reader = SampleReader(tables[name], verify=False)
        for number in numbers:
            reader.members(number)

    measured = alternate({"disk": lambda: read("disk"), "cache": lambda: read("cache")}, rounds=rounds)
    for kind in ("walls", "cpus"):
        ratio = pair_ratio(getattr(measured["cache"], kind), getattr(measured["disk"], kind))
        what = {"walls": "time", "cpus": "processor time"}[kind]
        print(
            f"warm cache over disk, {what}, {len(numbers)} images, {rounds} pairs: {ratio.median:.3f} "
            f"({ratio.lower:.3f} to {ratio.upper:.3f})",
            flush=True,
        )


@contextmanager
def bucket(directory: Path, delay: float) -> Iterator[str]:
    """The URL of a server that holds the data set."""
    import boto3
    from moto.server import ThreadedMotoServer

    from tests.faulty_server import faulty_server, server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    os.environ.update(KEYS)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket=BUCKET)
    for path in directory.rglob("*"):
        if path.is_file() and path.parent.name != "progress":
            client.upload_file(str(path), BUCKET, f"images/{path.relative_to(directory)}")
    real = server(host, port)

    def slowly(method: str, path: str, headers: object, content: bytes) -> object:
        time.sleep(delay)
        return real(method, path, headers, content)  # type: ignore[arg-type]

    with faulty_server(slowly) as (url, _):  # type: ignore[arg-type]
        yield url
    running.stop()


def one_run(options: Options) -> None:
    """One epoch of batches; prints what the cache did."""
    config = MaeConfig()
    config.data.path, config.data.workers, config.data.prefetch = options.one_run, 2, 2
    config.crops.count, config.crops.size, config.vision.patch_size = 1, 64, 16
    config.batch.global_size = config.batch.micro_size = 20
    sources = open_sources(config, rank=0, world=1)
    steps = sources.train.rows // 20
    began = time.perf_counter()
    for _ in range(steps):
        sources.train.next_window()
    seconds = time.perf_counter() - began
    use = CacheUse(**sources.cache_use())
    sources.close()
    opened = use.found + use.fetched
    print(
        f"{use.found / opened:.1%} of {opened} tars or blocks opened were there; {use.fetched} fetched when they "
        f"were opened and {use.ahead} ahead, {(use.fetched_bytes + use.ahead_bytes) / 1e6:.1f} MB; {seconds:.1f} s",
        flush=True,
    )


def compare_ways(directory: Path, options: Options) -> None:
    """Print a line for each way of fetching."""
    size = sum(path.stat().st_size for path in directory.rglob("*.tar"))
    bound = options.share * size
    print(f"{size / 1e6:.1f} MB of data, a cache of {bound / 1e6:.1f} MB, one epoch", flush=True)
    with bucket(directory, options.delay) as url:
        for name, environment in WAYS.items():
            with tempfile.TemporaryDirectory() as cache:
                variables = {
                    **os.environ,
                    "AWS_ENDPOINT_URL": url,
                    "TRP_SCALE_CACHE": cache,
                    "TRP_SCALE_CACHE_GB": str(bound / 1e9),
                    "OMP_NUM_THREADS": "1",
                    **environment,
                }
                print(f"{name}: ", end="", flush=True)
                command = [sys.executable, __file__, "--one_run", f"s3://{BUCKET}/images"]
                subprocess.run(command, env=variables, check=True)


def main() -> None:
    """Print both parts."""
    options = tyro.cli(Options, config=(tyro.conf.FlagConversionOff,))
    if options.one_run:
        one_run(options)
        return
    with tempfile.TemporaryDirectory() as place:
        # Copied, so that the files of both sides were written in large pieces.
        directory = Path(shutil.copytree(make(Path(place) / "made", options), Path(place) / "images"))
        if options.rounds:
            os.environ["TRP_SCALE_CACHE"] = f"{place}/cache"
            compare_with_disk(directory, options.rounds)
        compare_ways(directory, options)


if __name__ == "__main__":
    main()
