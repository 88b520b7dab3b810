"""Peak memory of a rank: plain on one process, FSDP2 and ZeRO-3 on two, and what the states alone should take.

    python benchmarks/memory.py [--layers 12] [--hidden_size 768]
    python benchmarks/memory.py --of start --hidden_size 1024 --layers 24
    python benchmarks/memory.py --of masks

Weights, gradients and two moments are 16 bytes a parameter in fp32, shared by the ranks; ZeRO-3 keeps the weights twice
(deepspeed 0.19.8 compares a device with its name and so never takes the master weights for the weights): 20. What
comes on top are activations (2 rows here), the parameters gathered for the layers at work, and the libraries' buffers.
On a CPU the figure is the resident set above what the imports take, with an allocator that gives memory back at once;
on GPUs it is torch's count of allocated memory.

start: the peak host memory while the model is made and sharded, without a step, over the bytes of its fp32 weights.
"shapes": as a run starts, parameters are shapes at first, and each rank fills its own pieces. "whole": each rank makes
the whole model, and the engine takes its pieces from it. On two ranks the weights alone are 0.5 (ZeRO-3 with its
masters 1.0). The vocabulary is 8,192 there.

masks: learned masks over plain MAE. The excess is in units of a rank's share of one copy of the weights (4 bytes a
parameter): vectors over all parameters that an update of the masking network holds. Images are small and few, so that
their activations take next to nothing, and the masking network is the small one (patchwise), whose states are printed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import Answer, on_ranks
from benchmarks.steps import micro_batches
from benchmarks.workloads import LENGTH, build_workload, masks_trainer, set_encoder
from trp_scale.config import BatchConfig, Config, ModelConfig, OptimizerConfig
from trp_scale.config.images import CropsConfig, MaeMaskingConfig, MaeVisionConfig
from trp_scale.config.registry import engine_rules, make_settings
from trp_scale.core.engine import Engine
from trp_scale.distributed.environment import Environment
from trp_scale.models.initialise import build_with_initialisers
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertModelConfig
from trp_scale.training.pretrain import build_second_engine

ROWS, STEPS = 2, 3
LAYOUTS = {"plain": ("plain", 1, 16), "fsdp": ("fsdp", 2, 16), "zero3": ("deepspeed", 2, 20)}
"""Engine, ranks, bytes of state a parameter."""
ZERO3 = Path(__file__).resolve().parent.parent / "ds_configs" / "zero3.json"


@dataclass(kw_only=True)
class Options:
    """The model: BERT-base, with masks ViT-B and MAE's decoder."""

    of: Literal["steps", "start", "masks"] = "steps"
    """What to measure: steps, the start of a run, or steps with learned masks."""
    layers: int = 12
    """Blocks of the encoder."""
    hidden_size: int = 768
    """Width of the encoder."""
    decoder_layers: int = 8
    """masks: blocks of the decoder."""
    size: int = 32
    """masks: side of the images in pixels. Four patches of 16 px leave nearly all memory to the weights."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """masks: layouts to measure."""


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(base: int) -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_bytes() - base


def on_layout(layout: str, measure: Callable[..., Answer], *arguments: object) -> list[Answer]:
    """Return `measure(layout, *arguments)` of each rank of a layout, in fresh processes, since the peak of a resident
    set never falls."""
    # Read by glibc at the start of the processes: freed tensors go back to the system and leave the resident set.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 17)
    return on_ranks(LAYOUTS[layout][1], measure, layout, *arguments)


@contextmanager
def ranks_environment(layout: str) -> Iterator[Environment]:
    """Enter the process group of a layout."""
    if LAYOUTS[layout][0] == "deepspeed":
        import deepspeed  # noqa: F401  its import belongs to the base line
    with Environment() as environment:
        yield environment


def engine_on(
    environment: Environment, layout: str, module: nn.Module, config: Config, *, second: bool = False
) -> Engine:
    """Return the engine of a layout, the model in it. `second`: as that of a masking network."""
    name = LAYOUTS[layout][0]
    build = partial(build_second_engine, name) if second else engine_rules(name).build
    document = json.loads(ZERO3.read_text()) if name == "deepspeed" else None
    device, group = environment.device, environment.data
    engine: Engine = build(module, config, device=device, data_group=group, ds_document=document)
    return engine


def settings(options: Options, world: int) -> PosBertConfig:
    """Return the settings of a run on `world` ranks."""
    return PosBertConfig(
        model=set_encoder(PosBertModelConfig(max_positions=LENGTH), options.layers, options.hidden_size),
        batch=BatchConfig(global_size=ROWS * world, micro_size=ROWS),
        optimizer=OptimizerConfig(warmup_steps=0),
        balancer=make_settings("balancer", "uniform"),
    )


def measure(layout: str, options: Options) -> tuple[int, int]:
    """Return peak bytes of a few training steps on a rank, and parameters."""
    config = settings(options, LAYOUTS[layout][1])
    with ranks_environment(layout) as environment:
        base = resident_bytes()
        work = build_workload(config)
        parameters = sum(parameter.numel() for parameter in work.module.parameters())
        engine = engine_on(environment, layout, work.module, config)
        batch = micro_batches(work.rows, ROWS)[0].to(environment.device)
        for _ in range(STEPS):
            losses = work.objective(engine, batch)
            engine.backward(losses.sums.sum() / 100, last=True)
            engine.check_gradients()
            engine.step(1e-4)
        peak = peak_bytes(base)
        engine.close()
    return peak, parameters


def measure_start(layout: str, options: Options, way: Literal["shapes", "whole"]) -> tuple[int, int]:
    """Return peak bytes of making and sharding the model on a rank, and parameters."""
    config = settings(options, LAYOUTS[layout][1])
    make = partial(BertForMaskedPositions, config.model, vocab_size=8192, seed=0)
    with ranks_environment(layout) as environment:
        base = resident_bytes()
        module = make() if way == "whole" else build_with_initialisers(make)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        engine = engine_on(environment, layout, module, config)
        peak = resident_bytes() - base
        engine.close()
    return peak, parameters


def print_start(options: Options) -> None:
    """Print the peak of both ways over the weights."""
    for layout in ("fsdp", "zero3"):
        for way in ("shapes", "whole"):
            answers = on_layout(layout, measure_start, options, way)
            weights = 4 * answers[0][1]
            print(f"{layout}, {weights / 4e6:,.0f} M, {way}: {max(answers)[0] / weights:.2f}", flush=True)


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


def masks_settings(options: Options, world: int, *, masks: bool) -> MaeConfig:
    """Return the settings of MAE, with updates of the masks at every step."""
    config = MaeConfig(
        model=set_encoder(ModelConfig(), options.layers, options.hidden_size),
        vision=MaeVisionConfig(decoder_layers=options.decoder_layers),
        crops=CropsConfig(size=options.size),
        masking=MaeMaskingConfig(ratio=0.5),
        batch=BatchConfig(global_size=world, micro_size=1),
        optimizer=OptimizerConfig(warmup_steps=0, schedule="constant"),
    )
    config.balancer = make_settings("balancer", "uniform")
    if masks:
        config.multilevel = make_settings("multilevel", "head", network="patchwise", unroll=1, every=1)
    return config


def measure_masks(layout: str, options: Options, masks: bool) -> Peak:
    """Return the peak of a few steps on this rank."""
    config = masks_settings(options, LAYOUTS[layout][1], masks=masks)
    with ranks_environment(layout) as environment:
        base = resident_bytes()
        engines: list[Engine] = []
        counts: list[int] = []

        def make_engine(module: nn.Module, config: Config) -> Engine:
            counts.append(sum(parameter.numel() for parameter in module.parameters()))
            engines.append(engine_on(environment, layout, module, config, second=bool(engines)))
            return engines[-1]

        trainer = masks_trainer(config, 1, make_engine)
        for _ in range(2):
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


def print_masks(options: Options) -> None:
    """Print the peak with masks and without, and the excess in copies of the weights."""
    table = Table(
        title=f"ViT {options.layers} x {options.hidden_size}, decoder {options.decoder_layers} x 512; MB a rank"
    )
    for name in ("layout", "ranks", "copy", "plain", "masks", "excess", "network's states", "copies without them"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for layout in options.layouts:
        plain, masks = (
            max(on_layout(layout, measure_masks, options, learned), key=lambda rank: rank.peak)
            for learned in (False, True)
        )
        table.add_row(*row_of(layout, plain, masks))
    Console(width=120).print(table)


def main(options: Options) -> None:
    if options.of != "steps":
        {"start": print_start, "masks": print_masks}[options.of](options)
        return
    print(f"{'layout':<8} {'ranks':>5} {'peak a rank':>12} {'states alone':>13} {'peak / plain':>13}")
    plain = 0
    for layout, (_, world, state_bytes) in LAYOUTS.items():
        peak, parameters = max(on_layout(layout, measure, options))
        plain = plain or peak
        states = state_bytes * parameters / world
        print(
            f"{layout:<8} {world:>5} {peak / 2**20:>9.0f} MB {states / 2**20:>10.0f} MB {peak / plain:>13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
