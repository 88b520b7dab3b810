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

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import EncoderSize, ImageStepOptions, image_recipe, mae_workload
from benchmarks.rounds import alternate, print_pairs, print_ratios
from benchmarks.steps import counted_flops, endless, whole_step
from trp_scale.models.flops import mae_step_flops
from trp_scale.pretraining.mae.settings import MaeConfig


@dataclass(kw_only=True)
class Options(ImageStepOptions):
    """What to measure."""

    crops: tuple[int, ...] = (1,)
    """Crops of MAE+ per image."""
    rows: int = 4
    """Images per step."""
    model: EncoderSize = "base"
    """ViT-Ti, S, B or L."""


def settings(options: Options, crops: int, decoder: Literal["transformer", "linear"]) -> MaeConfig:
    """MAE for 0 crops, else MAE+."""
    config = image_recipe("mae_plus_vit_b" if crops else "mae_vit_b", MaeConfig, options.model)
    if crops:
        config.crops.count, config.vision.decoder = crops, decoder
    return endless(config, options.rows, precision=options.precision)


def main(options: Options) -> None:
    device = options.device()
    configs = {"MAE": settings(options, 0, "transformer")}
    for crops in options.crops:
        configs[f"MAE+ k={crops}"] = settings(options, crops, "transformer")
        configs[f"MAE+ k={crops}, linear"] = settings(options, crops, "linear")
    steps = {name: whole_step(mae_workload(config), device) for name, config in configs.items()}
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
