"""Step time of MM-MAE as a share of what the machine's matrix products allow.

    python benchmarks/mm_mae_step_time.py [--model tiny] [--rows 16] [--precision bf16]

ViT-Ti/16 (12 x 192) on 224 px with 98 visible patches of three modalities, decoders of 2 x 256 with 8 heads, 133
classes; a whole step of the loop on random images, and a large matrix product of the same precision, in turn. Model
FLOPs are those of trp_scale/pretraining/mm_mae/upstream.py; torch's own count is beside it.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import CLASSES, MM_MAE, ImageStepOptions, image_recipe, mm_mae_workload
from benchmarks.rounds import Measured, alternate
from benchmarks.steps import Precision, counted_flops, endless, whole_step
from trp_scale.config.registry import settings_of
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.upstream import mm_mae_step_flops


@dataclass(kw_only=True)
class Options(ImageStepOptions):
    """What to measure."""

    rows: int = 16
    """Images per step."""
    rounds: int = 7
    """Measured steps, and as many measurements of the product."""
    precision: Precision = "bf16"
    """Of forward and backward, and of the product."""
    compile: bool = False
    """torch.compile on the model."""
    side: int = 2048
    """Of the product's square matrices."""
    products: int = 10
    """Products in one measurement."""


def main(options: Options) -> None:
    device = options.device()
    config = endless(image_recipe(MM_MAE, MmMaeConfig, options.model), options.rows, precision=options.precision)
    config.training.compile = "whole" if options.compile else "none"
    config.balancer = settings_of("balancer", "uniform")
    step = whole_step(mm_mae_workload(config), device)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    left, right, out = (torch.randn(options.side, options.side, device=device).to(dtype) for _ in range(3))

    def product() -> None:
        for _ in range(options.products):
            torch.matmul(left, right, out=out)

    measured = alternate({"step": step, "product": product}, rounds=options.rounds)
    model_flops = mm_mae_step_flops(config, rows=options.rows, classes=CLASSES)
    product_flops = 2.0 * options.side**3 * options.products
    print(f"{options.rows} images of {config.crops.size} px, ViT {options.model}, {options.precision}, {device.type}, ")
    print(f"{torch.get_num_threads()} threads; {model_flops / 1e9:.1f} GFLOP a step")
    print(f"(torch counts {counted_flops(step) / 1e9:.1f} as computed: every visible patch in all tokenisers, and")
    print("attention's scores again in the backward pass)")
    for clock in ("wall", "cpu"):
        print_share(measured, model_flops, product_flops, clock)


def print_share(measured: dict[str, Measured], model_flops: float, product_flops: float, clock: str) -> None:
    """The step's rate over the product's, the median over rounds."""
    steps, products = (getattr(measured[name], f"{clock}s") for name in ("step", "product"))
    rates = [product_flops / seconds / 1e9 for seconds in products]
    shares = [model_flops / step / (product_flops / product) for step, product in zip(steps, products, strict=True)]
    print(
        f"{clock}: step {statistics.median(steps) * 1e3:.0f} ms, product {statistics.median(rates):.0f} GFLOP/s, "
        f"share {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
