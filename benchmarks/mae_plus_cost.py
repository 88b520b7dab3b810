"""MAE+ with k crops against MAE: the whole training step per image, beside the ratio of their arithmetic.

    python benchmarks/mae_plus_cost.py [--crops 1 2 4] [--rows 8] [--model base]

MAE sees 49 of 196 patches of a 224 px image, MAE+ all 49 of a 112 px crop (AdPE 3.2), so that one crop costs the
encoder the same and the decoder a quarter. "linear" is MAE+ with the linear decoder.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import EncoderSize, counted_flops, random_images, resized, training_step
from benchmarks.rounds import alternate, print_pairs, print_ratios
from trp_scale.config import Config
from trp_scale.observe.throughput import mae_step_flops
from trp_scale.recipes.loader import load_recipe


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    crops: tuple[int, ...] = (1,)
    """Crops of MAE+ per image."""
    rows: int = 4
    """Images per step."""
    rounds: int = 7
    """Measured steps of each."""
    model: EncoderSize = "base"
    """ViT-Ti, S, B or L."""
    precision: Literal["bf16", "fp32"] = "fp32"
    """Of forward and backward."""
    threads: int = 0
    """Threads of torch; 0 = as torch chooses."""


def settings(options: Options, crops: int, decoder: Literal["transformer", "linear"]) -> Config:
    """MAE for 0 crops, else MAE+."""
    config = resized(load_recipe("mae_plus_vit_b" if crops else "mae_vit_b"), options.model)
    if crops:
        config.crops.count, config.vision.decoder = crops, decoder
    config.batch.global_size = config.batch.micro_size = options.rows
    config.training.steps, config.optimizer.warmup_steps = 10**9, 0
    config.training.precision = options.precision
    return config


def main(options: Options) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs = {"MAE": settings(options, 0, "transformer")}
    for crops in options.crops:
        configs[f"MAE+ k={crops}"] = settings(options, crops, "transformer")
        configs[f"MAE+ k={crops}, linear"] = settings(options, crops, "linear")
    steps = {
        name: training_step(config, random_images(config, options.rows), device) for name, config in configs.items()
    }
    print(f"ViT {options.model}, {options.rows} images a step, {options.precision}, {device.type}")
    whole = {name: mae_step_flops(config, rows=options.rows * config.crops.count) for name, config in configs.items()}
    counted = {name: counted_flops(step) for name, step in steps.items()}
    for name in configs:
        print(
            f"{name:<20} {whole[name] / options.rows / 1e9:8.1f} GFLOP an image, {whole[name] / whole['MAE']:.3f} of "
            f"MAE; as computed {counted[name] / options.rows / 1e9:.1f}, {counted[name] / counted['MAE']:.3f}"
        )
    measured = alternate(steps, rounds=options.rounds)
    print_ratios(measured, "MAE")
    print_pairs(measured, "MAE")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
