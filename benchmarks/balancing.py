"""What a step costs with each balancer: time in alternating rounds, and the matrix products that torch counts in one,
for MM-MAE ViT-Ti (three tasks) and PoS-BERT (ten). Beside them what TRP's Table 3 states, T being a step without
balancing. What each makes of the tasks: `trp-scale study run trp_groups`.

    python benchmarks/balancing.py [--rounds 15] [--rows 16] [--threads 1]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import MM_MAE, image_recipe, mm_mae_workload
from benchmarks.rounds import Measured, alternate, pair_ratio
from benchmarks.steps import Precision, StepOptions, Workload, counted_flops, endless, whole_step
from benchmarks.text_steps import LENGTH, small_bert, text_workload
from trp_scale.config import RefusedError
from trp_scale.config.registry import settings_of
from trp_scale.config.settings import Settings
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig

BALANCING: dict[str, tuple[Settings, str]] = {
    "uniform": (settings_of("balancer", "uniform"), "T"),
    "minimax": (settings_of("balancer", "minimax"), "2T"),
    "uncertainty": (settings_of("balancer", "uncertainty"), "2T"),
    "dwa": (settings_of("balancer", "dwa", interval_steps=2), "3T"),
    "gradnorm": (settings_of("balancer", "gradnorm"), "4T"),
    "gradnorm, representation": (settings_of("balancer", "gradnorm", at="representation"), ""),
    "group_dro": (settings_of("balancer", "group_dro"), ""),
}
"""Settings, and the FLOPs that TRP's Table 3 states."""


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure."""

    rows: int = 16
    """Images of a step; twice as many sequences."""
    rounds: int = 15
    """Measured steps of each."""
    threads: int = 0
    """Threads of torch; 0 = as torch chooses."""
    precision: Precision = "bf16"
    """Of forward and backward."""


def main(options: Options) -> None:
    """One table for each model."""
    device = options.device()
    for title, build in (
        (f"MM-MAE ViT-Ti, 3 tasks, {options.rows} images of 224 px", modalities),
        (f"PoS-BERT 4 x 256, 10 tasks, {2 * options.rows} x {LENGTH} tokens", text),
    ):
        steps = {name: whole_step(build(options, balancing), device) for name, (balancing, _) in BALANCING.items()}
        flops = {name: counted_flops(step) for name, step in steps.items()}
        measured = alternate(steps, rounds=options.rounds)
        where = f"{options.precision}, {device.type}, {torch.get_num_threads()} threads"
        Console(width=120).print(table_of(f"{title}, {where}, {options.rounds} rounds", measured, flops))


def table_of(title: str, measured: dict[str, Measured], flops: dict[str, int]) -> Table:
    """A row for each balancer."""
    table = Table(title=title, caption="interval: 95 % of the median ratio, by processor time; stated: TRP, Table 3")
    for name in ("balancer", "ms", "over uniform", "by processor time", "interval", "FLOPs over uniform", "stated"):
        table.add_column(name, justify="left" if name == "balancer" else "right")
    base = measured["uniform"]
    for name, one in measured.items():
        clock, processor = pair_ratio(one.walls, base.walls), pair_ratio(one.cpus, base.cpus)
        table.add_row(
            name,
            f"{one.wall * 1e3:.0f}",
            f"{clock.median:.4f}",
            f"{processor.median:.4f}",
            f"{processor.lower:.3f} to {processor.upper:.3f}",
            f"{flops[name] / flops['uniform']:.4f}",
            BALANCING[name][1],
        )
    return table


def text(options: StepOptions, balancing: Settings) -> Workload:
    """PoS-BERT with `other` as a tenth task."""
    config = PosBertConfig(
        model=small_bert(), objective=PosBertObjectiveConfig(other="task"), balancer=replace(balancing)
    )
    return text_workload(endless(config, 2 * options.rows, precision=options.precision))


def modalities(options: StepOptions, balancing: Settings) -> Workload:
    """MM-MAE with an encoder of ViT-Ti."""
    config = image_recipe(MM_MAE, MmMaeConfig, "tiny")
    config.balancer = replace(balancing)
    return mm_mae_workload(endless(config, options.rows, precision=options.precision))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
