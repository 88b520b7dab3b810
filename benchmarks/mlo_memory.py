"""Peak memory of a rank with learned masks over plain MAE: whole weights, FSDP2 and ZeRO-3 on two ranks.

    python benchmarks/mlo_memory.py [--layers 12] [--hidden_size 768]

The excess is in units of a rank's share of one copy of the weights (4 bytes a parameter): vectors over all parameters
that an update of the masking network holds. Images are small and few, so that what whole images add to activations is
next to nothing, and the masking network is the small one (patchwise), whose states are printed. On a CPU the peak is
the resident set above what the imports take, with an allocator that gives memory back at once; on GPUs it is torch's
count of allocated memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import LAYOUTS, engine_on, on_layout, peak_bytes, ranks_environment, resident_bytes
from benchmarks.workloads import masks_trainer, set_encoder
from trp_scale.config import BatchConfig, Config, ModelConfig, OptimizerConfig
from trp_scale.config.images import CropsConfig, MaeMaskingConfig, MaeVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.engine import Engine
from trp_scale.engines.build import build_engine, build_second_engine
from trp_scale.pretraining.mae.settings import MaeConfig

ROWS, CYCLES = 1, 2


@dataclass(kw_only=True)
class Options:
    """The model: ViT-B with MAE's decoder on four patches of 16 px, so that weights are nearly everything."""

    layers: int = 12
    """Blocks of the encoder."""
    hidden_size: int = 768
    """Width of the encoder."""
    decoder_layers: int = 8
    """Blocks of the decoder."""
    size: int = 32
    """Side of the images in pixels."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Which are measured."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Memory of a rank.

    Attributes:
        peak: largest memory in bytes.
        parameters: of the model.
        network: of the masking network.
    """

    peak: int
    parameters: int
    network: int


def settings(options: Options, world: int, *, masks: bool) -> MaeConfig:
    """Updates of everything at every step."""
    config = MaeConfig(
        model=set_encoder(ModelConfig(), options.layers, options.hidden_size),
        vision=MaeVisionConfig(decoder_layers=options.decoder_layers),
        crops=CropsConfig(size=options.size),
        masking=MaeMaskingConfig(ratio=0.5),
        batch=BatchConfig(global_size=ROWS * world, micro_size=ROWS),
        optimizer=OptimizerConfig(warmup_steps=0, schedule="constant"),
    )
    config.balancer = make_settings("balancer", "uniform")
    if masks:
        config.multilevel = make_settings("multilevel", "head", network="patchwise", unroll=1, every=1)
    return config


def measure(layout: str, options: Options, masks: bool) -> Peak:
    """Return the peak of a few steps on this rank."""
    config = settings(options, LAYOUTS[layout][1], masks=masks)
    with ranks_environment(layout) as environment:
        base = resident_bytes()
        engines: list[Engine] = []
        counts: list[int] = []

        def make_engine(module: nn.Module, config: Config) -> Engine:
            build = build_second_engine if engines else build_engine
            counts.append(sum(parameter.numel() for parameter in module.parameters()))
            engines.append(engine_on(environment, layout, module, config, build))
            return engines[-1]

        trainer = masks_trainer(config, ROWS, make_engine)
        for _ in range(CYCLES):
            trainer.train_step()
        peak = peak_bytes(base)
        for engine in engines:
            engine.close()
    return Peak(peak=peak, parameters=counts[0], network=sum(counts[1:]))


def row_of(layout: str, plain: Peak, masks: Peak) -> tuple[str, ...]:
    """A line of the table: memory in MB, and the excess in copies of the weights."""
    _, world, state_bytes = LAYOUTS[layout]
    copy, states = 4 * plain.parameters / world, state_bytes * masks.network / world
    excess = masks.peak - plain.peak
    megabytes = (copy, plain.peak, masks.peak, excess, states)
    return (layout, str(world), *(f"{size / 2**20:.0f}" for size in megabytes), f"{(excess - states) / copy:.2f}")


def main(options: Options) -> None:
    table = Table(
        title=f"ViT {options.layers} x {options.hidden_size}, decoder {options.decoder_layers} x 512; MB a rank"
    )
    for name in ("layout", "ranks", "copy", "plain", "masks", "excess", "network's states", "copies without them"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for layout in options.layouts:
        plain, masks = (
            max(on_layout(layout, measure, options, learned), key=lambda rank: rank.peak) for learned in (False, True)
        )
        table.add_row(*row_of(layout, plain, masks))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
