"""Peak host memory of a rank while a model is made and sharded, without a step, over the bytes of its fp32 weights.

    python benchmarks/start_memory.py [--hidden_size 1024] [--layers 6 12 24] [--layouts fsdp zero3]

"shapes": as a run starts, the model's parameters are shapes at first, and each rank fills its own pieces, one tensor or
one block at a time. "whole": each rank makes the whole model, and the engine takes its pieces from it. Two ranks; the
weights alone are 0.5 (ZeRO-3 with its masters 1.0). BERT with a vocabulary of 8,192; FSDP2 keeps nothing else until the
first step. The resident set above what the imports take, on a CPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import LAYOUTS, ZERO3, on_ranks, resident_bytes
from trp_scale.config import BatchConfig, TextModelConfig
from trp_scale.distributed.environment import Environment
from trp_scale.engines.build import build_engine
from trp_scale.models.initialise import without_content
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions
from trp_scale.upstreams.pos_bert.settings import PosBertConfig

VOCABULARY = 8192


@dataclass(kw_only=True)
class Options:
    """The models."""

    hidden_size: int = 1024
    """Width."""
    layers: list[int] = field(default_factory=lambda: [6, 12, 24])
    """Transformer blocks, one model for each number."""
    layouts: list[str] = field(default_factory=lambda: ["fsdp", "zero3"])
    """Of memory.py."""


def measure(layout: str, hidden_size: int, layers: int, whole: bool) -> tuple[int, int]:
    """Start a rank: peak bytes above the imports, and parameters."""
    name, world, _ = LAYOUTS[layout]
    config = PosBertConfig(
        model=TextModelConfig(
            layers=layers, hidden_size=hidden_size, heads=hidden_size // 64, intermediate_size=4 * hidden_size
        ),
        batch=BatchConfig(global_size=world, micro_size=1),
    )
    if name == "deepspeed":
        import deepspeed  # noqa: F401  its import belongs to the base line
    make = partial(BertForMaskedPositions, config.model, vocab_size=VOCABULARY, seed=0)
    with Environment() as environment:
        document = json.loads(ZERO3.read_text()) if name == "deepspeed" else None
        base = resident_bytes()
        module = make() if whole else without_content(make)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        engine = build_engine(
            name, module, config, device=environment.device, data_group=environment.data, ds_document=document
        )
        peak = resident_bytes() - base
        engine.close()
    return peak, parameters


def main(options: Options) -> None:
    """Start each model both ways, and print."""
    print("| layout | parameters | shapes | whole |\n| --- | --- | --- | --- |")
    for layout in options.layouts:
        for layers in options.layers:
            cells = []
            for whole in (False, True):
                found = on_ranks(layout, measure, options.hidden_size, layers, whole)
                parameters = found[0][1]
                cells.append(f"{max(peak for peak, _ in found) / (4 * parameters):.2f}")
            print(f"| {layout} | {parameters / 1e6:,.0f} M | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
