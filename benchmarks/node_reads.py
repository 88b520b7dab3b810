"""Blocks, tars and bytes that each machine reads of a data set, with rows in the order of the source and by block.

    python benchmarks/node_reads.py [--nodes 8] [--ranks 8] [--global_size 4096] [--images 131072]

Each rank of each machine takes its rows of every global batch of an epoch, as a run does (plan.ByBlock), and reads them
from sparse tars: blocks and tars are counted once a machine for each global batch, and over windows of `window` of
them, which is what a cache could have in common; bytes and requests are those of os.preadv. No clock is read.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import index_start
from trp_scale.data.hashing import Integers
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.images.reader import SampleReader
from trp_scale.data.plan import ByBlock, Member, Plan, TrainPlan


@dataclass(kw_only=True)
class Options:
    """The cluster and the data set."""

    nodes: int = 8
    """Machines."""
    ranks: int = 8
    """Of each machine."""
    global_size: int = 4096
    """Rows of a global batch."""
    images: int = 131_072
    """In all tars."""
    shards: int = 64
    """Tars."""
    window: int = 4
    """Global batches over which blocks count once for a machine."""


def means(plan: Plan, dataset: ImageDataset, options: Options) -> list[float]:
    """Blocks and tars of a global batch, and blocks of a window of them, for a machine: means over an epoch."""
    size, each = options.global_size, options.global_size // options.nodes
    tars = np.searchsorted(dataset.samples.starts, dataset.blocks.first, side="right")  # [blocks] number of the tar
    counts: list[tuple[int, int]] = []
    over_windows: list[int] = []
    for node in range(options.nodes):
        seen: list[Integers] = []
        for start in range(0, plan.rows - size + 1, size):
            first = start + node * each
            blocks = np.unique(plan.locate(np.arange(first, first + each)).block)
            counts.append((len(blocks), len(np.unique(tars[blocks]))))
            seen.append(blocks)
            if len(seen) == options.window:
                over_windows.append(len(np.unique(np.concatenate(seen))))
                seen = []
    blocks_and_tars: list[float] = np.mean(counts, axis=0).tolist()
    return [*blocks_and_tars, float(np.mean(over_windows))]


def reads(plan: Plan, dataset: ImageDataset, options: Options) -> tuple[int, int]:
    """Requests and bytes of the first global batch on the first machine."""
    taken: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        taken.append(count := real(descriptor, buffers, offset))
        return count

    reader = SampleReader(dataset.samples, verify=False)
    addresses = plan.locate(np.arange(options.global_size // options.nodes))
    with mock.patch("os.preadv", counted):
        for number in (dataset.blocks.first[addresses.block] + addresses.row).tolist():
            reader.members(number)
    return len(taken), sum(taken)


def main() -> None:
    """Print a line for each order."""
    options = tyro.cli(Options)
    with tempfile.TemporaryDirectory() as place:
        index_start.make(
            Path(place), index_start.Options(shards=options.shards, images=options.images, indexes=["json"])
        )
        dataset = open_image_dataset(Path(place))
        chosen = np.ones(len(dataset.blocks.rows), dtype=np.bool_)
        member = Member(name="", weight=Fraction(1), table=dataset.blocks, chosen=chosen)
        plan = TrainPlan(seed=0, members=[member], blocks_per_group=16)
        print(
            f"{options.nodes} machines of {options.ranks} ranks, global batch {options.global_size}, "
            f"{len(chosen)} blocks of {index_start.ROWS_PER_BLOCK} images in {options.shards} tars"
        )
        plans: dict[str, Plan] = {"as shuffled": plan, "by block": ByBlock(plan, first=0, size=options.global_size)}
        for name, each in plans.items():
            blocks, tars, window = means(each, dataset, options)
            requests, size = reads(each, dataset, options)
            print(
                f"{name}: a machine reads of {blocks:.1f} blocks in {tars:.1f} tars for a global batch, of "
                f"{window:.1f} blocks for {options.window}; {requests} requests of preadv and {size / 1e6:.2f} MB "
                "for a global batch"
            )


if __name__ == "__main__":
    main()
