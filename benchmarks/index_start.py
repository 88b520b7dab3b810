"""Start-up time and memory of a node's processes for a data set of many images, with JSON indexes and the binary one.

    python benchmarks/index_start.py [--shards 100] [--images 400000] [--processes 4]
    python benchmarks/index_start.py --shards 10000 --images 400000000 --indexes binary

Each of `processes`, started at once, opens the data set, makes the plan of an epoch and finds the rows of its part of a
global batch, as a rank does. Seconds are from the start of the opening to the slowest process. Memory is what the
opening adds to the processes' proportional shares (Pss in /proc/PID/smaps_rollup), summed: a page that several map is
counted once. Processes beyond the first count as loader workers: they take the plan from it, pickled.

The tars are holes of the right size, and so are the samples' records where the JSON indexes are not made: the start
reads neither. Files are in the page cache.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.data.binary_index import NAME, IndexWriter, _end_digest
from trp_scale.data.images.dataset import _cut, open_image_dataset, write_image_index
from trp_scale.data.images.rows import RowReader
from trp_scale.data.index import Block, Member, ShardIndex, index_path, write_index, write_json
from trp_scale.data.plan import Member as PlanMember
from trp_scale.data.plan import TrainPlan

IMAGE_BYTES = 61_000
ROWS_PER_BLOCK, BLOCKS_PER_GROUP, BATCH = 64, 16, 4096
Index = Literal["json", "binary"]


@dataclass(kw_only=True)
class Options:
    """The data set."""

    shards: int = 100
    """Tars."""
    images: int = 400_000
    """In all tars."""
    processes: int = 4
    """Of a node: one rank, and workers."""
    indexes: list[Index] = field(default_factory=lambda: ["json", "binary"])
    """Which are read; json is made for them unless only binary is."""
    directory: Path | None = None
    """Where the files go; a temporary directory if not given."""


class _Holes(IndexWriter):
    """Leaves the records out: they read as zeros."""

    def add_hole(self, name: str, size: int, count: int) -> None:
        beside = index_path(self._directory / name)
        self._stream.seek(count * self._record.itemsize, 1)
        self._tars.append([name, size, beside.stat().st_size, _end_digest(beside), bytes(16).hex()])
        self._counts.append(count)


def make(directory: Path, options: Options) -> None:
    """The data set, with the indexes that are asked for."""
    shards = directory / "shards"
    shards.mkdir()
    each = options.images // options.shards
    names = [f"image-{number:06d}.tar" for number in range(options.shards)]
    size = each * (IMAGE_BYTES + 1024)
    for name in names:
        with (shards / name).open("wb") as stream:
            stream.truncate(size)
        if "json" in options.indexes:
            blocks = [
                Block(
                    key=f"{name[6:12]}{place:06d}",
                    rows=1,
                    members={"jpg": Member(offset=512 + place * 61_440, length=IMAGE_BYTES, crc32=place * 7919)},
                )
                for place in range(each)
            ]
            write_index(shards / name, ShardIndex(shard=name, size=size, blocks=blocks))
        else:
            index_path(shards / name).write_text("{}\n")
    document = {"format": 1, "kind": "image", "shards": names, "suffixes": ["jpg"], "rows": each * options.shards}
    write_json(directory / "dataset.json", {**document, "rows_per_block": ROWS_PER_BLOCK, "classes": None})
    if "json" in options.indexes:
        return
    with (shards / NAME).open("wb") as stream:
        writer = _Holes(shards, stream, ("jpg",))
        for name in names:
            writer.add_hole(name, size, each)
        blocks_of, _ = _cut([Path(name).stem for name in names], writer.counts, ROWS_PER_BLOCK)
        writer.finish(blocks_of, digest="of holes", rows_per_block=ROWS_PER_BLOCK)


def proportional_bytes() -> dict[str, int]:
    """Proportional share of this process's memory: all, of this process alone, of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {"all": found["Pss"], "own": found["Pss_Anon"], "files": found["Pss_File"]}


def rank(directory: Path, pipe: Connection, number: int) -> None:
    """Opens the data set, hands over what workers get, and waits to be measured."""
    before = proportional_bytes()
    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    dataset = open_image_dataset(directory)
    chosen = np.ones(len(dataset.blocks.rows), dtype=np.bool_)
    plan = TrainPlan(
        seed=0,
        members=[PlanMember(name="", weight=Fraction(1), table=dataset.blocks, chosen=chosen)],
        blocks_per_group=BLOCKS_PER_GROUP,
    )
    reader = RowReader([dataset], dataset.meta, verify=False)
    plan.locate(np.arange(BATCH))
    pipe.send((plan, reader, time.perf_counter() - began))
    _measured(pipe, before)


def worker(directory: Path, pipe: Connection, number: int) -> None:
    """Takes the plan and finds the rows of its part of a batch."""
    before = proportional_bytes()
    pipe.send("ready")
    plan, _reader = pipe.recv()
    began = time.perf_counter()
    plan.locate(np.arange(number * BATCH, (number + 1) * BATCH))
    pipe.send(time.perf_counter() - began)
    _measured(pipe, before)


def _measured(pipe: Connection, before: dict[str, int]) -> None:
    pipe.recv()
    pipe.send({name: value - before[name] for name, value in proportional_bytes().items()})
    pipe.recv()


def measure(directory: Path, processes: int) -> tuple[float, dict[str, int]]:
    """Seconds until all processes have their first rows, and the bytes that this takes on the node."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for number in range(processes):
        ours, theirs = context.Pipe()
        started.append(context.Process(target=rank if number == 0 else worker, args=(directory, theirs, number)))
        started[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    began = time.perf_counter()
    pipes[0].send("begin")
    plan, reader, _ = pipes[0].recv()
    for pipe in pipes[1:]:
        pipe.send((plan, reader))
    for pipe in pipes[1:]:
        pipe.recv()
    seconds = time.perf_counter() - began
    del plan, reader
    total = {"all": 0, "own": 0, "files": 0}
    for pipe in pipes:
        pipe.send("measure")
        for name, value in pipe.recv().items():
            total[name] += value
    for pipe, process in zip(pipes, started, strict=True):
        pipe.send("end")
        process.join()
    return seconds, total


def main() -> None:
    """Print a line for each kind of index."""
    options = tyro.cli(Options)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        directory = Path(place)
        make(directory, options)
        print(f"{options.shards} shards, {options.images} images, {options.processes} processes")
        for index in options.indexes:
            if index == "binary" and "json" in options.indexes:
                names = sorted(path.name for path in (directory / "shards").glob("*.tar"))
                write_image_index(directory / "shards", names, ("jpg",), ROWS_PER_BLOCK)
            seconds, taken = measure(directory, options.processes)
            megabytes = {name: value / 1e6 for name, value in taken.items()}
            print(
                f"{index:>7}: {seconds:6.2f} s, {megabytes['all']:7.1f} MB a node "
                f"({megabytes['own']:.1f} of processes, {megabytes['files']:.1f} of mapped files)"
            )


if __name__ == "__main__":
    main()
