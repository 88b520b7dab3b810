"""What learned masks cost per step of the encoder, over plain MAE: counted arithmetic, and time.

    python benchmarks/mlo_cost.py [--rows 8] [--rounds 7]

Arithmetic is that of ViT-B/16 on 224 px with a decoder of 8 x 512: trp_scale/methods/learned_masks/flops.py for ours,
torch's own count for the reference, which differentiates automatically through the encoder's last step
(benchmarks/mlo_unrolled.py). Operations that launch work (benchmarks/step_counts.py) and time are of ViT-Ti with a
decoder of the same proportions, in alternating rounds, of whole cycles, divided by their steps; the arithmetic of that
model is beside it. D_tr and D_val have as many images as a step.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.image_steps import ImageStepOptions, image_recipe, mae_objective, random_images, resized
from benchmarks.mlo_steps import CLASSES, cycle, cycle_steps, labelled_window, masks_trainer, plain_engines
from benchmarks.mlo_unrolled import Rates, UnrolledMasks
from benchmarks.rounds import Measured, alternate, pair_ratio
from benchmarks.step_counts import CountsOperations
from benchmarks.steps import counted_flops, endless
from trp_scale.config import split_patches
from trp_scale.config.registry import settings_of
from trp_scale.core import pieces
from trp_scale.methods.learned_masks.flops import multilevel_step_flops
from trp_scale.methods.learned_masks.masking_network import NETWORKS
from trp_scale.models.flops import mae_step_flops
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig

PLAIN = "plain MAE"
OURS: dict[str, tuple[int, int, int]] = {
    "unroll 2, every 1": (2, 1, 1),
    "unroll 2, every 5": (2, 5, 1),
    "unroll 1, every 1": (1, 1, 1),
    "unroll 2, every 1, two micro-batches": (2, 1, 2),
}
"""Steps of the encoder, updates of the head, and micro-batches of D_tr and of D_val."""
REFERENCE = {f"automatic differentiation, unroll {unroll}": unroll for unroll in (2, 1)}


ON_A_GPU = pieces.together(torch.device("cuda"))


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
    """ViT-B/16 with MAE's decoder."""
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


def with_masks(config: MaeConfig, options: Options, cycle_of: tuple[int, int, int]) -> MaeConfig:
    """These settings with learned masks."""
    config = copy.deepcopy(config)
    unroll, every, parts = cycle_of
    own = {"network": options.network, "unroll": unroll, "every": every, "micro_size": options.rows // parts}
    config.multilevel = settings_of("multilevel", "head", **own)
    return config


def reference_cycle(config: MaeConfig, options: Options, unroll: int, device: torch.device) -> Callable[[], object]:
    """A cycle of the reference over images of noise."""
    config = with_masks(config, options, (unroll, 1, 1))
    with device:
        model, network = MaskedAutoencoder(config), NETWORKS[options.network](config)
        visible = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio).visible
        masks = UnrolledMasks(model, network, classes=CLASSES, visible=visible, unroll=unroll, rates=Rates())
    (labelled,) = labelled_window(config, options.rows)
    objective = mae_objective(config)
    patches = objective.patches(random_images(config, options.rows)).to(device)
    train = objective.patches(labelled).to(device), labelled["labels"].to(device)
    return lambda: masks.cycle([patches] * unroll, train, train)


def over_plain(config: MaeConfig, options: Options) -> dict[str, float]:
    """Arithmetic of one step of the encoder over a step of plain MAE, both as they are computed."""
    plain = mae_step_flops(config, rows=options.rows, computed=True)
    found = {PLAIN: 1.0}
    for name, cycle_of in OURS.items():
        found[name] = multilevel_step_flops(with_masks(config, options, cycle_of), ranks=1, computed=True) / plain
    for name, unroll in REFERENCE.items():
        # On the meta device nothing is computed or held.
        run = reference_cycle(config, replace(options, rows=1), unroll, torch.device("meta"))
        found[name] = counted_flops(run) * options.rows / unroll / plain
    return found


def operations(run: Callable[[], object]) -> int:
    """That launch work; one over a list of tensors is one, and lists are as long as on a GPU."""
    run()  # the optimizers' states are made
    with mock.patch.object(pieces, "together", lambda _: ON_A_GPU), CountsOperations() as counter:
        run()
    return sum(counter.counts.operations.values())


def measure(options: Options, device: torch.device) -> tuple[dict[str, Measured], dict[str, float]]:
    """Seconds of one step of the encoder, and its operations."""
    config = measured_model(options)
    configs = {PLAIN: config, **{name: with_masks(config, options, one) for name, one in OURS.items()}}
    steps = {name: cycle_steps(one) for name, one in configs.items()} | REFERENCE
    calls = {name: cycle(one, masks_trainer(one, options.rows, plain_engines(device))) for name, one in configs.items()}
    calls |= {name: reference_cycle(config, options, unroll, device) for name, unroll in REFERENCE.items()}
    launched = {name: operations(call) / steps[name] for name, call in calls.items()}
    measured = {
        name: Measured(
            walls=tuple(wall / steps[name] for wall in one.walls), cpus=tuple(cpu / steps[name] for cpu in one.cpus)
        )
        for name, one in alternate(calls, rounds=options.rounds, warmup=1).items()
    }
    return measured, launched


def main(options: Options) -> None:
    device = options.device()
    arithmetic, own = over_plain(large(options), options), over_plain(measured_model(options), options)
    measured, launched = measure(options, device)
    images = f"{options.rows} images of {options.size} px, {options.precision}"
    where = f"{device.type}, {torch.get_num_threads()} threads, {options.rounds} rounds"
    table = Table(
        title=f"cost per step of the encoder over plain MAE; time of ViT {options.model}, {images}, {where}",
        caption="interval: 95 % of the median ratio, by processor time",
    )
    timed = ("by processor time", "interval", "by the clock", "ms")
    for name in ("masks", "FLOPs, ViT-B", "FLOPs, measured", "operations", *timed):
        table.add_column(name, justify="left" if name == "masks" else "right")
    base = measured[PLAIN]
    for name, one in measured.items():
        clock, processor = pair_ratio(one.walls, base.walls), pair_ratio(one.cpus, base.cpus)
        table.add_row(
            name,
            f"{arithmetic[name]:.2f}",
            f"{own[name]:.2f}",
            f"{launched[name]:,.0f}",
            f"{processor.median:.2f}",
            f"{processor.lower:.2f} to {processor.upper:.2f}",
            f"{clock.median:.2f}",
            f"{one.wall * 1e3:.0f}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
