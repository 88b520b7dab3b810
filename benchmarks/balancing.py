"""Every balancer beside uniform weights: what a step costs, and what the held-out loss of each task becomes.

    python benchmarks/balancing.py --part cost [--rounds 15] [--rows 16] [--threads 1]
    python benchmarks/balancing.py --part outcome [--seeds 3] [--steps 0] [--processes 2]

cost: whole training steps in alternating rounds, and the matrix products that torch counts in one, for MM-MAE ViT-Ti
(three tasks) and PoS-BERT (ten). Beside them what TRP's Table 3 states, T being a step without balancing.
outcome: `mm_mae_tiny` and `pos_bert_tiny` with each balancer and several seeds, equal steps; a run that is finished is
not repeated. The recipes' data must be there (README).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.balancing_cost import print_cost
from benchmarks.balancing_outcome import print_outcome
from benchmarks.steps import Precision, StepOptions
from trp_scale.config import RefusedError


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure."""

    part: Literal["cost", "outcome"] = "cost"
    """Steps and FLOPs, or what is learned."""
    rows: int = 16
    """cost: images of a step; twice as many sequences."""
    rounds: int = 15
    """cost: measured steps of each."""
    threads: int = 0
    """cost: threads of torch; 0 = as torch chooses."""
    precision: Precision = "bf16"
    """cost: of forward and backward."""
    recipes: tuple[str, ...] = ("mm_mae_tiny", "pos_bert_tiny")
    """outcome: what is trained."""
    seeds: int = 3
    """outcome: seeds 0, 1, ... of each."""
    steps: int = 0
    """outcome: of each run; 0 = the recipe's."""
    processes: int = 2
    """outcome: runs at a time, one thread each."""
    run_dir: Path = Path("runs/balancing")
    """outcome: directory of the runs."""


def main(options: Options) -> None:
    if options.part == "outcome":
        print_outcome(
            options.recipes,
            options.run_dir,
            seeds=options.seeds,
            steps=options.steps,
            processes=options.processes,
        )
        return
    print_cost(options)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
