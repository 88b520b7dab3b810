"""Text sharded over a Ray cluster by two workers, over one.

    python benchmarks/tagging_on_ray.py [--tagger nltk] [--inputs books.jsonl] [--rounds 5]

A cluster of two nodes of one CPU on this machine; one worker is the same command with `--processes 1`. Rounds
alternate. The time is that of the whole command on a cluster that runs: finding the input, handing out shards, loading
tokenizer and tagger in each worker, tagging, the last index. The tokenizer is given.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, pair_ratio
from trp_scale.data.index import read_json
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    tagger: Literal["nltk", "textblob"] = "textblob"
    """Tagger of the words."""
    inputs: list[str] = field(default_factory=list)
    """As of shard-text; none = the embedded corpus."""
    shards: int = 16
    """About how many the input is cut into."""
    rounds: int = 5
    """Rounds of each."""


@contextmanager
def two_nodes() -> Iterator[None]:
    """A head without CPUs, and two nodes of one, which this process is connected to."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(options: Options) -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as name, two_nodes():
        directory, numbers = Path(name), count()
        given = {"inputs": options.inputs, "embedded": not options.inputs, "tagger": options.tagger, "progress": False}
        first = shard_text(ShardTextConfig(output=directory / "first", **given))  # type: ignore[arg-type]
        words = read_json(first / "dataset.json")["words"]
        size = sum(Path(each).stat().st_size for each in options.inputs) or 2_200_000

        def shard(processes: int) -> None:
            shard_text(
                ShardTextConfig(
                    output=directory / str(next(numbers)),
                    tokenizer=str(first / "tokenizer"),
                    shard_bytes=size // options.shards,
                    executor="ray",
                    processes=processes,
                    **given,  # type: ignore[arg-type]
                )
            )

        found = alternate({"one": lambda: shard(1), "two": lambda: shard(2)}, rounds=options.rounds, warmup=1)
    ratio = pair_ratio(found["one"].walls, found["two"].walls)
    print(f"{options.tagger}: {words:,} words, {options.rounds} alternating rounds")
    for workers, measured in found.items():
        print(f"  {workers} {words / measured.wall:>10,.0f} words/s")
    print(f"  two over one {ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f}; wanted: at least 1.7)")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
