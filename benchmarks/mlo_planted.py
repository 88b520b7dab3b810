"""Learned masks on a problem with a known answer (planted_patches.py): does the probe gain, and what do they mask?

For each seed, the accuracy of a linear probe on the encoder's features after equally many steps, by random masks and by
learned ones, and how many of the masked patches carry the class: by chance 6 of 16.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planted_patches import PATCHES, SIGNALS, STEPS, planted_run

LAST = 10
"""Steps over which the share of masks on the signal is averaged, at the start and at the end."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one seed.

    Attributes:
        untrained, random, learned: accuracy of the probe.
        share_before, share_after: of the masked patches, how many carry the class, over the first and the last steps.
    """

    untrained: float
    random: float
    learned: float
    share_before: float
    share_after: float

    @property
    def margin(self) -> float:
        return self.learned - self.random


def outcome(seed: int, steps: int = STEPS) -> Outcome:
    """Both runs of a seed."""
    random, learned = (planted_run(seed, learned=learned, steps=steps) for learned in (False, True))
    untrained = random.probe()
    random.train()
    learned.train()
    return Outcome(
        untrained=untrained,
        random=random.probe(),
        learned=learned.probe(),
        share_before=statistics.fmean(learned.shares[:LAST]),
        share_after=statistics.fmean(learned.shares[-LAST:]),
    )


def table_of(found: Sequence[Outcome], steps: int) -> Table:
    table = Table(
        "seed",
        "untrained",
        "random masks",
        "learned masks",
        "margin",
        "masks on the signal, start",
        "end",
        title=f"Probe after {steps} steps; by chance {SIGNALS / PATCHES:.2f} of the masks are on the signal",
    )
    for seed, one in enumerate(found):
        values = (one.untrained, one.random, one.learned, one.margin, one.share_before, one.share_after)
        table.add_row(str(seed), *(f"{value:.3f}" for value in values))
    table.add_row("mean", *[""] * 3, f"{statistics.fmean(one.margin for one in found):.3f}")
    return table


@dataclass(kw_only=True)
class Options:
    seeds: int = 3
    """Problems and runs, one of each seed."""
    steps: int = STEPS
    """Of the encoder."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = tyro.cli(Options, args=argv, description=__doc__, use_underscores=True)
    torch.set_num_threads(1)
    found = [outcome(seed, arguments.steps) for seed in range(arguments.seeds)]
    Console(width=120).print(table_of(found, arguments.steps))


if __name__ == "__main__":
    main()
