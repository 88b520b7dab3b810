"""What the adversary costs over MAE+, and relative positions over absolute ones: the whole training step, one process.

    python benchmarks/adversary_overhead.py [--rows 8] [--rounds 60] [--model tiny]

Each adversary is measured against MAE+ with the same positions and the same index of the relative table, in pairs that
alternate: the median of the ratios within each round, beside the ratio of medians. The paper says less than 1.015
(4.1.1). The matrix products that an adversary adds are counted by torch.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import ImageStepOptions, image_recipe, mae_workload
from benchmarks.rounds import alternate, print_pairs, print_ratios
from benchmarks.steps import counted_flops, endless, whole_step
from trp_scale.config.registry import settings_of
from trp_scale.pretraining.mae.settings import MaeConfig

BASES: dict[str, tuple[Literal["absolute", "relative"], Literal["rounded", "relaxed"]]] = {
    "MAE+ absolute": ("absolute", "rounded"),
    "MAE+ relative, rounded": ("relative", "rounded"),
    "MAE+ relative, relaxed": ("relative", "relaxed"),
}
"""vision.positions and vision.index."""
ADVERSARIES = {
    "absolute_embedding": "MAE+ absolute",
    "absolute_coordinate": "MAE+ absolute",
    "relative_embedding": "MAE+ relative, rounded",
    "relative_coordinate": "MAE+ relative, relaxed",
}
"""The baseline of each: the same arithmetic without the adversary."""


@dataclass(kw_only=True)
class Options(ImageStepOptions):
    """What to measure."""

    rows: int = 8
    """Images per step, each with four crops of 112 px."""
    rounds: int = 60
    """Measured pairs of each."""
    kinds: tuple[str, ...] = tuple(ADVERSARIES)
    """Adversaries to measure."""


def settings(options: Options, base: str) -> MaeConfig:
    """MAE+ of the paper at the chosen size."""
    config = image_recipe("mae_plus_vit_b", MaeConfig, options.model)
    config.vision.positions, config.vision.index = BASES[base]
    return endless(config, options.rows, precision=options.precision)


def main(options: Options) -> None:
    device = options.device()
    configs = {base: settings(options, base) for base in BASES}
    where = f"{options.precision}, {device.type}, {options.rounds} rounds"
    print(f"ViT {options.model}, {options.rows} images of 4 x 112 px, {where}")
    steps = {base: whole_step(mae_workload(config), device) for base, config in configs.items()}
    flops = {base: counted_flops(step) for base, step in steps.items()}
    for kind in options.kinds:
        base = ADVERSARIES[kind]
        config = copy.deepcopy(configs[base])
        config.adversary = settings_of("adversary", kind)
        name = f"AdPE {kind}"
        pair = {base: steps[base], name: whole_step(mae_workload(config), device)}
        added = counted_flops(pair[name]) - flops[base]
        print(
            f"\n{name}: {added / flops[base]:.4%} more matrix products than the {flops[base] / 1e9:.1f} GFLOP of {base}"
        )
        measured = alternate(pair, rounds=options.rounds)
        print_ratios(measured, base)
        print_pairs(measured, base)
    print("\nrelative positions over absolute ones, without an adversary:")
    for base in steps:
        print(f"{base}: {flops[base] / flops['MAE+ absolute']:.4f} of the matrix products")
    measured = alternate(steps, rounds=options.rounds)
    print_ratios(measured, "MAE+ absolute")
    print_pairs(measured, "MAE+ absolute")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
