"""Peak host memory of a rank while a model is made and sharded, without a step, over the bytes of its fp32 weights.

    python benchmarks/start_memory.py [--hidden_size 1024] [--layers 6 12 24] [--layouts fsdp zero3]
    python benchmarks/start_memory.py --hidden_size 2304 --layers 8 32 --layouts fsdp --ways shapes --then step
    python benchmarks/start_memory.py --hidden_size 2560 --layers 38 --layouts fsdp --ways shapes --then step \
        --optimizer adamw --offload_directory /local

"shapes": as a run starts, the model's parameters are shapes at first, and each rank fills its own pieces, one tensor or
one block at a time. "whole": each rank makes the whole model, and the engine takes its pieces from it. Two ranks; the
weights alone are 0.5 (ZeRO-3 with its masters 1.0). BERT with a vocabulary of 8,192; FSDP2 keeps nothing else until the
first step. The resident set above what the imports take, on a CPU.

With "--offload_directory" weights and moments are files there (FSDP2). The rank's own memory counts, which the system
cannot take back as it can pages of files; the last lines are both, in GB, at the end of each part of the step.

"--then step" goes on with one step of gradient descent on one row a rank, blocks' activations checkpointed, and
"--then forward" with a forward pass; the last column is their peak over the same bytes. Gradients are as many bytes as
weights, so that two ranks together need 8 bytes a parameter for a step and 4 for a forward pass.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import LAYOUTS, ZERO3, on_ranks, resident_bytes
from benchmarks.text_steps import random_batch
from trp_scale.config import BatchConfig, FsdpConfig, OptimizerConfig, TextModelConfig, TrainingConfig
from trp_scale.core.engine import Engine
from trp_scale.data.text.groups import GROUPS
from trp_scale.distributed.environment import Environment
from trp_scale.engines.build import build_engine
from trp_scale.models.initialise import without_content
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

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
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Of the step."""
    offload_directory: Path | None = None
    """Of FSDP2: where weights and moments lie."""


class Watched(threading.Thread):
    """Watches the resident set of this process: the peak of its own memory, and both kinds at named moments."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.curve: list[tuple[str, int, int]] = []
        self.start()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self.now()[0])
            time.sleep(0.05)

    def now(self) -> tuple[int, int]:
        """Bytes of its own, and of files."""
        lines = Path("/proc/self/status").read_text().splitlines()
        kinds = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
        own, mapped = (1024 * int(kinds[name].split()[0]) for name in ("RssAnon", "RssFile"))
        return own, mapped

    def at(self, moment: str) -> None:
        """Note both."""
        self.curve.append((moment, *self.now()))


@dataclass(frozen=True)
class Found:
    """Of a rank: peak bytes above the imports at the start and with what follows it, parameters, and the curve."""

    start: int
    later: int
    parameters: int
    curve: list[tuple[str, int, int]]


def measure(layout: str, options: Options, layers: int, way: Way) -> Found:
    """Start a rank."""
    hidden_size, then = options.hidden_size, options.then
    name, world, _ = LAYOUTS[layout]
    config = PosBertConfig(
        model=TextModelConfig(
            layers=layers, hidden_size=hidden_size, heads=hidden_size // 64, intermediate_size=4 * hidden_size
        ),
        batch=BatchConfig(global_size=world, micro_size=1),
        optimizer=OptimizerConfig(kind=options.optimizer),
        fsdp=FsdpConfig(
            offload=bool(options.offload_directory), offload_directory=str(options.offload_directory or "")
        ),
        training=TrainingConfig(activation_checkpointing="full"),
    )
    if name == "deepspeed":
        import deepspeed  # noqa: F401  its import belongs to the base line
    make = partial(BertForMaskedPositions, config.model, vocab_size=VOCABULARY, seed=0)
    with Environment() as environment:
        document = json.loads(ZERO3.read_text()) if name == "deepspeed" else None
        watched = Watched()
        base, before = resident_bytes(), watched.now()[0]

        def taken() -> int:
            return watched.peak - before if options.offload_directory else resident_bytes() - base

        module = make() if way == "whole" else without_content(make)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        engine = build_engine(
            name, module, config, device=environment.device, data_group=environment.data, ds_document=document
        )
        watched.at("start")
        peak = taken()
        go_on(engine, config, then, watched)
        later = taken()
        engine.close()
    return Found(peak, later, parameters, watched.curve)


def go_on(engine: Engine, config: PosBertConfig, then: Then, watched: Watched) -> None:
    """One row of random words."""
    if then == "nothing":
        return
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    batch = random_batch(1, LENGTH, MASKED)
    for name in ("tokens", "labels"):
        batch.fields[name] %= VOCABULARY
    with torch.set_grad_enabled(then == "step"):
        total = objective(engine, batch.to(engine.device)).sums.sum() / 100
    watched.at("forward")
    if then == "step":
        engine.backward(total, last=True)
        watched.at("backward")
        if not bool(engine.check_gradients().isfinite()):
            raise SystemExit("the gradient is not finite")
        engine.step(1e-4)
        watched.at("update")


def main(options: Options) -> None:
    """Start each model in each way, and print."""
    heads = [*options.ways, *([options.then] if options.then != "nothing" else [])]
    print(f"| layout | parameters | {' | '.join(heads)} |\n|{' --- |' * (2 + len(heads))}")
    for layout in options.layouts:
        for layers in options.layers:
            cells, after, curve = [], 0.0, []
            for way in options.ways:
                found = on_ranks(layout, measure, options, layers, way)
                weights = 4 * found[0].parameters
                cells.append(f"{max(each.start for each in found) / weights:.2f}")
                after = after or max(each.later for each in found) / weights
                curve = found[0].curve
            if options.then != "nothing":
                cells.append(f"{after:.2f}")
            print(f"| {layout} | {weights / 4e6:,.0f} M | {' | '.join(cells)} |", flush=True)
            for moment, own, mapped in curve if options.offload_directory else ():
                print(f"{moment}: {own / 1e9:.2f} GB of its own, {mapped / 1e9:.2f} GB of files", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
