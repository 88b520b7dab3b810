"""What the adversary costs over MAE+, and relative positions over absolute ones: the whole training step, one process.

    python benchmarks/adversary_overhead.py [--rows 8] [--rounds 50] [--model tiny]

Each adversary is measured against MAE+ with the same positions and the same index of the relative table, in pairs that
alternate. The paper says less than 1.015 (4.1.1).
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import random_images, training_step
from benchmarks.rounds import alternate, print_ratios
from trp_scale.config import Config
from trp_scale.recipes.loader import load_recipe

MODELS = {"tiny": (12, 192, 3), "small": (12, 384, 6), "base": (12, 768, 12)}

BASES = {
    "MAE+ absolute": {"positions": "absolute", "index": "rounded"},
    "MAE+ relative, rounded": {"positions": "relative", "index": "rounded"},
    "MAE+ relative, relaxed": {"positions": "relative", "index": "relaxed"},
}
ADVERSARIES = {
    "absolute_embedding": "MAE+ absolute",
    "absolute_coordinate": "MAE+ absolute",
    "relative_embedding": "MAE+ relative, rounded",
    "relative_coordinate": "MAE+ relative, relaxed",
}


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    rows: int = 8
    """Images per step, each with four crops of 112 px."""
    rounds: int = 50
    """Measured steps of each."""
    model: Literal["tiny", "small", "base"] = "tiny"
    """ViT-Ti, S or B, with the decoder of 8 x 512."""


def settings(options: Options, positions: dict[str, str], device: torch.device) -> Config:
    """MAE+ of the paper at the chosen size."""
    config = load_recipe("mae_plus_vit_b")
    layers, width, heads = MODELS[options.model]
    config.model.layers, config.model.hidden_size, config.model.heads = layers, width, heads
    config.model.intermediate_size = 4 * width
    for name, value in positions.items():
        setattr(config.vision, name, value)
    config.batch.global_size = config.batch.micro_size = options.rows
    config.training.steps, config.optimizer.warmup_steps = 10**9, 0
    config.training.precision = "bf16" if device.type == "cuda" else "fp32"
    return config


def main(options: Options) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs = {name: settings(options, positions, device) for name, positions in BASES.items()}
    batch = random_images(next(iter(configs.values())), options.rows)
    steps = {name: training_step(config, batch, device) for name, config in configs.items()}
    print(f"ViT {options.model}, {options.rows} images of 4 x 112 px, {device.type}, {options.rounds} rounds")
    for kind, base in ADVERSARIES.items():
        config = copy.deepcopy(configs[base])
        config.adversary.kind = kind  # type: ignore[assignment]
        pair = {base: steps[base], f"AdPE {kind}": training_step(config, batch, device)}
        print_ratios(alternate(pair, rounds=options.rounds), base)
    print_ratios(alternate(steps, rounds=options.rounds), "MAE+ absolute")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
