"""Peak host memory of a rank while a model is made and sharded, without a step, over the bytes of its fp32 weights.

    python benchmarks/start_memory.py [--hidden_size 1024] [--layers 6 12 24] [--layouts fsdp zero3]
    python benchmarks/start_memory.py --hidden_size 2304 --layers 8 32 --layouts fsdp --ways shapes --then step

"shapes": as a run starts, the model's parameters are shapes at first, and each rank fills its own pieces, one tensor or
one block at a time. "whole": each rank makes the whole model, and the engine takes its pieces from it. Two ranks; the
weights alone are 0.5 (ZeRO-3 with its masters 1.0). BERT with a vocabulary of 8,192; FSDP2 keeps nothing else until the
first step. The resident set above what the imports take, on a CPU.

"--then step" goes on with one step of gradient descent on one row a rank, blocks' activations checkpointed, and
"--then forward" with a forward pass; the last column is their peak over the same bytes. Gradients are as many bytes as
weights, so that two ranks together need 8 bytes a parameter for a step and 4 for a forward pass.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import LAYOUTS, ZERO3, on_ranks, resident_bytes
from benchmarks.text_steps import random_batch
from trp_scale.config import BatchConfig, OptimizerConfig, TextModelConfig, TrainingConfig
from trp_scale.core.engine import Engine
from trp_scale.data.text.groups import GROUPS
from trp_scale.distributed.environment import Environment
from trp_scale.engines.build import build_engine
from trp_scale.models.initialise import without_content
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions
from trp_scale.upstreams.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.upstreams.pos_bert.settings import PosBertConfig

VOCABULARY, LENGTH, MASKED = 8192, 32, 5
Then = Literal["nothing", "forward", "step"]
Way = Literal["shapes", "whole"]


@dataclass(kw_only=True)
class Options:
    """The models."""

    hidden_size: int = 1024
    """Width."""
    layers: list[int] = field(default_factory=lambda: [6, 12, 24])
    """Transformer blocks, one model for each number."""
    layouts: list[str] = field(default_factory=lambda: ["fsdp", "zero3"])
    """Of memory.py."""
    ways: list[Way] = field(default_factory=lambda: ["shapes", "whole"])
    """How a model is made."""
    then: Then = "nothing"
    """What follows the start."""


def measure(layout: str, hidden_size: int, layers: int, way: Way, then: Then) -> tuple[int, int, int]:
    """Start a rank: peak bytes above the imports, the same with what follows the start, and parameters."""
    name, world, _ = LAYOUTS[layout]
    config = PosBertConfig(
        model=TextModelConfig(
            layers=layers, hidden_size=hidden_size, heads=hidden_size // 64, intermediate_size=4 * hidden_size
        ),
        batch=BatchConfig(global_size=world, micro_size=1),
        optimizer=OptimizerConfig(kind="sgd"),
        training=TrainingConfig(activation_checkpointing="full"),
    )
    if name == "deepspeed":
        import deepspeed  # noqa: F401  its import belongs to the base line
    make = partial(BertForMaskedPositions, config.model, vocab_size=VOCABULARY, seed=0)
    with Environment() as environment:
        document = json.loads(ZERO3.read_text()) if name == "deepspeed" else None
        base = resident_bytes()
        module = make() if way == "whole" else without_content(make)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        engine = build_engine(
            name, module, config, device=environment.device, data_group=environment.data, ds_document=document
        )
        peak = resident_bytes() - base
        go_on(engine, config, then)
        later = resident_bytes() - base
        engine.close()
    return peak, later, parameters


def go_on(engine: Engine, config: PosBertConfig, then: Then) -> None:
    """One row of random words."""
    if then == "nothing":
        return
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    batch = random_batch(1, LENGTH, MASKED)
    for name in ("tokens", "labels"):
        batch.fields[name] %= VOCABULARY
    with torch.set_grad_enabled(then == "step"):
        total = objective(engine, batch.to(engine.device)).sums.sum() / 100
    if then == "step":
        engine.backward(total, last=True)
        if not bool(engine.check_gradients().isfinite()):
            raise SystemExit("the gradient is not finite")
        engine.step(1e-4)


def main(options: Options) -> None:
    """Start each model in each way, and print."""
    heads = [*options.ways, *([options.then] if options.then != "nothing" else [])]
    print(f"| layout | parameters | {' | '.join(heads)} |\n|{' --- |' * (2 + len(heads))}")
    for layout in options.layouts:
        for layers in options.layers:
            cells, after = [], 0.0
            for way in options.ways:
                found = on_ranks(layout, measure, options.hidden_size, layers, way, options.then)
                weights = 4 * found[0][2]
                cells.append(f"{max(start for start, _, _ in found) / weights:.2f}")
                after = after or max(later for _, later, _ in found) / weights
            if options.then != "nothing":
                cells.append(f"{after:.2f}")
            print(f"| {layout} | {weights / 4e6:,.0f} M | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
