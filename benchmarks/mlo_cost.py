"""Cost of learned masks per step of the encoder, over plain MAE: counted arithmetic, and time.

    python benchmarks/mlo_cost.py [--rows 8] [--rounds 7]

Arithmetic is that of ViT-B/16 on 224 px with a decoder of 8 x 512.
Operations that launch work (benchmarks/step_counts.py) and time are of ViT-Ti with a decoder of the same proportions,
in alternating rounds of whole cycles, divided by their steps. D_tr and D_val have the images of a step.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import Measured, alternate, print_ratios
from benchmarks.step_counts import CountsOperations
from benchmarks.steps import endless, model_flops
from benchmarks.workloads import (
    ImageStepOptions,
    cycle,
    cycle_steps,
    image_recipe,
    masks_trainer,
    plain_engines,
    resized,
)
from trp_scale.config.registry import make_settings
from trp_scale.core import pieces
from trp_scale.pretraining.mae.settings import MaeConfig

PLAIN = "plain MAE"
OURS: dict[str, tuple[int, int, int]] = {
    "unroll 2, every 1": (2, 1, 1),
    "unroll 2, every 5": (2, 5, 1),
    "unroll 1, every 1": (1, 1, 1),
    "unroll 2, every 1, two micro-batches": (2, 1, 2),
}
"""Steps of the encoder, updates of the head, and micro-batches of D_tr and of D_val."""
ON_A_GPU = pieces.foreach_chunk_bytes(torch.device("cuda"))


@dataclass(kw_only=True)
class Options(ImageStepOptions):
    """What to measure."""

    rows: int = 8
    """Images per step; even."""
    decoder_layers: int = 8
    """Of the measured model; its decoder's width is two thirds of the encoder's, as ViT-B's."""
    size: int = 224
    """Side of the measured model's images in pixels."""
    network: Literal["flattened", "patchwise"] = "flattened"
    """The masking network."""


def large(options: Options) -> MaeConfig:
    return endless(image_recipe("mae_vit_b", MaeConfig, "base"), options.rows, precision=options.precision)


def measured_model(options: Options) -> MaeConfig:
    """The same in small."""
    config = resized(large(options), options.model)
    config.vision.decoder_layers, config.vision.decoder_heads = options.decoder_layers, config.model.heads
    config.vision.decoder_hidden_size = config.model.hidden_size * 2 // 3
    while config.vision.decoder_hidden_size % config.vision.decoder_heads:
        config.vision.decoder_heads -= 1
    config.crops.size = options.size
    return config


def with_masks(config: MaeConfig, options: Options, numbers: tuple[int, int, int]) -> MaeConfig:
    """These settings with learned masks."""
    config = copy.deepcopy(config)
    unroll, every, parts = numbers
    settings = {"network": options.network, "unroll": unroll, "every": every, "micro_size": options.rows // parts}
    config.multilevel = make_settings("multilevel", "head", **settings)
    return config


def over_plain(config: MaeConfig, options: Options) -> dict[str, float]:
    """Return the arithmetic of a step of the encoder over a step of plain MAE, both as they are computed."""
    plain = model_flops(config)
    ratios = {PLAIN: 1.0}
    for name, numbers in OURS.items():
        ratios[name] = model_flops(with_masks(config, options, numbers)) / plain
    return ratios


def count_operations(run: Callable[[], object]) -> int:
    """Count operations that launch work; an operation over a list of tensors is one, and lists are as on a GPU."""
    run()  # the optimizers' states are made
    with mock.patch.object(pieces, "foreach_chunk_bytes", lambda _: ON_A_GPU), CountsOperations() as counter:
        run()
    return sum(counter.counts.operations.values())


def main(options: Options) -> None:
    device = options.device()
    config = measured_model(options)
    configs = {PLAIN: config, **{name: with_masks(config, options, numbers) for name, numbers in OURS.items()}}
    steps = {name: cycle_steps(settings) for name, settings in configs.items()}
    engines = plain_engines(device)
    calls = {name: cycle(masks, masks_trainer(masks, options.rows, engines)) for name, masks in configs.items()}
    operations = {name: f"{count_operations(call) / steps[name]:,.0f}" for name, call in calls.items()}
    measured = {
        name: Measured(
            walls=tuple(wall / steps[name] for wall in times.walls), cpus=tuple(cpu / steps[name] for cpu in times.cpus)
        )
        for name, times in alternate(calls, rounds=options.rounds, warmup=1).items()
    }
    columns = {"operations": operations}
    for title, model in (("FLOPs, ViT-B", large(options)), ("FLOPs, measured", config)):
        columns[title] = {name: f"{ratio:.2f}" for name, ratio in over_plain(model, options).items()}
    size = f"{options.rows} images of {options.size} px, {options.precision}, {torch.get_num_threads()} threads"
    print_ratios(f"a step of the encoder, ViT {options.model}, {size}, {device.type}", measured, PLAIN, columns)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
