"""What minimax weighting costs over uniform weights: the whole training step, on one process.

    python benchmarks/minimax_overhead.py [--rows 32] [--rounds 15]

`exact` with one micro-batch takes its weights from the very forward pass that is weighted, `lagged` from the last step:
both should cost nothing. `exact` with several micro-batches adds a forward pass without gradients; it is shown beside.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, print_ratios
from benchmarks.steps import StepOptions, Workload, endless, whole_step
from benchmarks.text_steps import LENGTH, small_bert, text_workload
from trp_scale.config.registry import settings_of
from trp_scale.config.settings import Settings
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

BALANCING = {
    "uniform": settings_of("balancer", "uniform"),
    "minimax lagged": settings_of("balancer", "minimax", estimate="lagged"),
    "minimax exact": settings_of("balancer", "minimax", estimate="exact"),
}


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure."""

    rounds: int = 15
    """Measured steps of each."""
    accumulation: int = 4
    """Micro-batches of the second comparison."""


def workload(balancing: Settings, options: Options, accumulation: int) -> Workload:
    """PoS-BERT over as many rows, whatever their micro-batches."""
    config = PosBertConfig(model=small_bert(), balancer=balancing)
    micro = options.rows // accumulation
    return text_workload(endless(config, micro, accumulation=accumulation, precision=options.precision))


def main(options: Options) -> None:
    device = options.device()
    for accumulation in (1, options.accumulation):
        print(f"{options.rows} x {LENGTH} tokens, accumulation {accumulation}, {options.precision}, {device.type}")
        steps = {name: whole_step(workload(one, options, accumulation), device) for name, one in BALANCING.items()}
        print_ratios(alternate(steps, rounds=options.rounds), "uniform")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
