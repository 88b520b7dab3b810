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

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import EncoderSize, counted_flops, random_images, resized, training_step
from benchmarks.rounds import alternate, print_pairs, print_ratios
from trp_scale.config import Config
from trp_scale.config.components import settings_of
from trp_scale.recipes.loader import load_recipe

BASES: dict[str, tuple[str, str]] = {
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
class Options:
    """What to measure."""

    rows: int = 8
    """Images per step, each with four crops of 112 px."""
    rounds: int = 60
    """Measured pairs of each."""
    model: EncoderSize = "tiny"
    """ViT-Ti, S, B or L, with the decoder of 8 x 512."""
    kinds: tuple[str, ...] = tuple(ADVERSARIES)
    """Adversaries to measure."""
    threads: int = 0
    """Threads of torch; 0 = as torch chooses."""


def settings(options: Options, base: str, device: torch.device) -> Config:
    """MAE+ of the paper at the chosen size."""
    config = resized(load_recipe("mae_plus_vit_b"), options.model)
    positions, index = BASES[base]
    config.vision.positions, config.vision.index = positions, index  # type: ignore[assignment]
    config.batch.global_size = config.batch.micro_size = options.rows
    config.training.steps, config.optimizer.warmup_steps = 10**9, 0
    config.training.precision = "bf16" if device.type == "cuda" else "fp32"
    return config


def main(options: Options) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs = {base: settings(options, base, device) for base in BASES}
    batch = random_images(configs["MAE+ absolute"], options.rows)
    print(f"ViT {options.model}, {options.rows} images of 4 x 112 px, {device.type}, {options.rounds} rounds")
    steps = {base: training_step(config, batch, device) for base, config in configs.items()}
    flops = {base: counted_flops(step) for base, step in steps.items()}
    for kind in options.kinds:
        base = ADVERSARIES[kind]
        config = copy.deepcopy(configs[base])
        config.adversary = settings_of("adversary", kind)
        name = f"AdPE {kind}"
        pair = {base: steps[base], name: training_step(config, batch, device)}
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
