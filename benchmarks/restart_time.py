"""Seconds from kill -9 of a rank to the end of the next step, by how the ranks start again.

    python benchmarks/restart_time.py --data data/embedded [--recipe pos_bert_tiny] [--rounds 3] [--way W ...]

Two ranks under torchrun or deepspeed write checkpoints; rank 1 is killed in a random step after the fifth. The ways:

by hand        the same command, as soon as the launcher has ended: what a batch script does at best
max_restarts   torchrun --max-restarts 1
in place       --reliability.restarts 1, under torchrun
deepspeed by hand, deepspeed in place

Beside the time: how many steps are made again. Rounds alternate over the ways.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.distributed.launched import descendants, environment_of, kill_all, wait_for_steps
from tests.ranks import free_port
from tests.runs import lines, start

WAYS = {
    "by hand": (["torchrun", "--nproc_per_node", "2"], []),
    "max_restarts": (["torchrun", "--nproc_per_node", "2", "--max-restarts", "1"], []),
    "in place": (["torchrun", "--nproc_per_node", "2"], ["--reliability.restarts", "1"]),
    "deepspeed by hand": (["deepspeed", "--num_gpus", "2"], ["--ds_config", "ds_configs/zero2.json"]),
    "deepspeed in place": (
        ["deepspeed", "--num_gpus", "2"],
        ["--ds_config", "ds_configs/zero2.json", "--reliability.restarts", "1"],
    ),
}
"""The launcher, and flags of the run."""


@dataclass(kw_only=True)
class Options:
    """What is measured."""

    data: Path
    """Data set of the recipe."""
    recipe: str = "pos_bert_tiny"
    """Of the run."""
    rounds: int = 3
    """Kills of each way."""
    way: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """Of WAYS; none: all."""


def main() -> None:
    """Print the median of each way, the range, and its ratio to the first one."""
    options = tyro.cli(Options)
    ways = options.way or [*WAYS]
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(measured(options, way))
            seconds, again = found[way][-1]
            print(f"{way}: {seconds:.1f} s, {again} steps made again", flush=True)
    first = statistics.median(seconds for seconds, _ in found[ways[0]])
    for way in ways:
        all_of = [seconds for seconds, _ in found[way]]
        middle = statistics.median(all_of)
        print(f"{way:20} {middle:6.1f} s ({min(all_of):.1f} to {max(all_of):.1f})  {middle / first:.2f} of {ways[0]}")


def measured(options: Options, way: str) -> tuple[float, int]:
    """Seconds of one kill, and steps made again."""
    launcher, flags = WAYS[way]
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place) / "run"
        run = f"--recipe {options.recipe} --data.path {options.data} --run_dir {run_dir} --training.steps 100000"
        settings = "--checkpoint.every 5 --logging.every 1 --validation.every 0"

        def begun() -> subprocess.Popen[str]:
            executable = str(Path(sys.executable).parent / launcher[0])
            command = [executable, *launcher[1:], "--master_port", str(free_port())]
            return start([*run.split(), *settings.split(), *flags], command)

        process = begun()
        wait_for_steps(process, run_dir, 6 + random.randrange(4))
        reached = lines(run_dir)[-1]["step"]
        os.kill(rank_of(process), signal.SIGKILL)
        killed = time.perf_counter()
        if way.endswith("by hand"):
            process.communicate()
            process = begun()
        again = stepped(run_dir, killed_with=(run_dir / "metrics.jsonl").stat().st_ino, alive=lambda: process.poll())
        seconds = time.perf_counter() - killed
        kill_all(process)
        return seconds, reached - again + 1


def rank_of(process: subprocess.Popen[str]) -> int:
    """Process id of rank 1, which has no children here but its loader's workers: the one that is in the run."""
    ranks = [pid for pid in descendants(process.pid) if environment_of(pid).get("RANK") == "1"]
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in ranks}
    return [pid for pid in ranks if b"--recipe" in names[pid]][-1]


def stepped(run_dir: Path, *, killed_with: int, alive: Callable[[], int | None]) -> int:
    """The first step that is made again, once it is. A start puts a file without later steps in the place of
    metrics.jsonl, and appends to it."""
    metrics = run_dir / "metrics.jsonl"
    size = 0
    while True:
        if alive() is not None:
            raise SystemExit(f"the run ended with {alive()}")
        found = metrics.stat()
        if found.st_ino != killed_with:
            size = size or found.st_size
            if found.st_size > size:
                return int(lines(run_dir)[-1]["step"])
        time.sleep(0.005)


if __name__ == "__main__":
    main()
