"""Finished training sequences of the loader per CPU-second, and the share of each stage.

    python benchmarks/loader.py --data DATASET [--micro-sizes 32 256]

Finished means: addressed, read, paired, masked, tagged, and a Batch of torch tensors. The rate is rows over the CPU
time of this process (so other work on the machine does not count), median over rounds in which the sizes take turns.
Rows are read from the page cache: the figure is the processor's part, not the disk's. The breakdown comes from profiled
rounds in addition to the measured ones.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate
from trp_scale.data import plan
from trp_scale.data.text import dataset as text_rows
from trp_scale.data.train_source import TrainSource
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.pos_bert import batch as text_batch
from trp_scale.pretraining.pos_bert import masking
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

STAGES = {
    "address (order, shuffles)": (plan.__file__, "locate"),
    "read rows from the maps": (text_rows.__file__, "read"),
    "draw pairs": (text_batch.__file__, "draw_pairs"),
    "lay out the sequences": (text_batch.__file__, "_lay_out"),
    "mask": (masking.__file__, "mask"),
    "tensors": (text_batch.__file__, "_fields"),
}
"""File and function of each stage; none calls another. What is left is Python between them and torch's DataLoader."""


@dataclass(kw_only=True)
class Options:
    """What is measured."""

    data: Path
    """A data set made by trp-scale shard-text."""
    micro_sizes: tuple[int, ...] = (32, 256)
    """Rows per micro-batch."""
    rounds: int = 9
    """Rounds per size."""
    rows: int = 8192
    """Rows per round."""


def breakdown(train: TrainSource, stages: Mapping[str, tuple[str, str]], rest: str) -> dict[str, float]:
    """Return the share of a profiled window's time by stage.

    Args:
        stages: file and function of each; none may call another.
        rest: name of the remaining time.
    """
    profile = cProfile.Profile()
    profile.runcall(train.next_window)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    seconds: dict[tuple[str, str], float] = {}
    for (file, _, name), (_, _, _, cumulated, _) in stats.items():
        # A plan's `locate` calls that of its orders, in the same file: the outer call counts for both.
        seconds[file, name] = max(cumulated, seconds.get((file, name), 0.0))
    shares = {stage: seconds.get(function, 0.0) / total for stage, function in stages.items()}
    return {**shares, rest: 1.0 - sum(shares.values())}


def open_train(options: Options, micro_size: int) -> TrainSource:
    """The training rows in this process; one window is one round."""
    config = PosBertConfig()
    config.data.path, config.data.workers, config.data.validation_fraction = str(options.data), 0, 0.0
    config.batch.micro_size = micro_size
    config.batch.global_size = -(-options.rows // micro_size) * micro_size
    config.model.max_positions = 1 << 16
    return open_sources(config, rank=0, world=1).train


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    trains = {micro: open_train(options, micro) for micro in options.micro_sizes}
    windows = {str(micro): train.next_window for micro, train in trains.items()}
    measured = alternate(windows, rounds=options.rounds, warmup=1)  # the first round maps the files
    table = Table("", *(f"micro-batch {micro}" for micro in trains), title="Loader, one process")
    rows = {micro: -(-options.rows // micro) * micro for micro in trains}
    rates = {micro: [rows[micro] / seconds for seconds in measured[str(micro)].cpus] for micro in trains}
    medians = (f"{statistics.median(values):,.0f}" for values in rates.values())
    table.add_row("finished sequences per CPU-second", *medians)
    spread = (f"{min(values):,.0f} - {max(values):,.0f}" for values in rates.values())
    table.add_row("slowest and fastest round", *spread, end_section=True)
    shares = [breakdown(train, STAGES, "Python between, DataLoader") for train in trains.values()]
    for stage in shares[0]:
        table.add_row(stage, *(f"{share[stage]:.0%}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
