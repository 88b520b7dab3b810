"""Peak memory of a rank: plain on one process, FSDP2 and ZeRO-3 on two, beside what the states alone should take.

    python benchmarks/memory.py [--layers 12] [--hidden_size 768]

Weights, gradients and two moments are 16 bytes a parameter in fp32, shared by the ranks; ZeRO-3 keeps the weights twice
(deepspeed 0.19.8 compares a device with its name and so never takes the master weights for the weights): 20. What
comes on top are activations (2 rows here), the parameters gathered for the layers at work, and the libraries' buffers.
On a CPU the figure is the resident set above what the imports take, with an allocator that gives memory back at once;
on GPUs it is torch's count of allocated memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import tyro

from trp_scale.config import TextModelConfig
from trp_scale.upstreams.pos_bert.settings import PosBertConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.step_time import LENGTH, VOCABULARY, random_batch
from trp_scale.config import BatchConfig, OptimizerConfig
from trp_scale.config.components import settings_of
from trp_scale.data.text.groups import GROUPS
from trp_scale.distributed.environment import Environment
from trp_scale.engines.build import build_engine
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions
from trp_scale.upstreams.pos_bert.objective import PosMaskedLanguageModelling

ROWS, STEPS, PORT = 2, 3, 29611
LAYOUTS = {"plain": ("plain", 1, 16), "fsdp": ("fsdp", 2, 16), "zero3": ("deepspeed", 2, 20)}
"""Engine, ranks, bytes of state a parameter."""
ZERO3 = Path(__file__).resolve().parent.parent / "ds_configs" / "zero3.json"


@dataclass(kw_only=True)
class Options:
    """The model: BERT-base."""

    layers: int = 12
    """Transformer blocks."""
    hidden_size: int = 768
    """Width."""


def resident_bytes() -> int:
    """Peak resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(rank: int, layout: str, options: Options, answers: Any) -> None:
    """A few training steps on one rank; puts (rank, peak bytes, parameters)."""
    engine_name, world, _ = LAYOUTS[layout]
    port = PORT + list(LAYOUTS).index(layout)
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        os.environ.update({name: str(value) for name, value in values.items()})
    config = PosBertConfig(
        model=TextModelConfig(
            layers=options.layers,
            hidden_size=options.hidden_size,
            heads=options.hidden_size // 64,
            intermediate_size=4 * options.hidden_size,
            max_positions=LENGTH,
        ),
        batch=BatchConfig(global_size=ROWS * world, micro_size=ROWS),
        optimizer=OptimizerConfig(warmup_steps=0),
        balancer=settings_of("balancer", "uniform"),
    )
    if engine_name == "deepspeed":
        import deepspeed  # noqa: F401  its import belongs to the base line
    with Environment() as environment:
        torch.set_num_threads(1)
        base = resident_bytes()
        module = BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=0)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        document = json.loads(ZERO3.read_text()) if engine_name == "deepspeed" else None
        engine = build_engine(
            engine_name, module, config, device=environment.device, data_group=environment.data, ds_document=document
        )
        objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
        batch = random_batch(ROWS).to(environment.device)
        for _ in range(STEPS):
            losses = objective(engine, batch)
            engine.backward(losses.sums.sum() / 100, last=True)
            engine.check_gradients()
            engine.step(1e-4)
        on_gpu = environment.device.type == "cuda"
        answers.put((rank, torch.cuda.max_memory_allocated() if on_gpu else resident_bytes() - base, parameters))
        engine.close()


def main(options: Options) -> None:
    # Read by glibc at the start of the processes below: freed tensors go back to the system and leave the resident set.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 17)
    context = multiprocessing.get_context("spawn")
    print(f"{'layout':<8} {'ranks':>5} {'peak a rank':>12} {'states alone':>13} {'peak / plain':>13}")
    plain = 0
    for layout, (_, world, state_bytes) in LAYOUTS.items():
        answers = context.SimpleQueue()
        processes = [context.Process(target=measure, args=(rank, layout, options, answers)) for rank in range(world)]
        for process in processes:
            process.start()
        found = [answers.get() for _ in processes]
        for process in processes:
            process.join()
        peak, parameters = max(peak for _, peak, _ in found), found[0][2]
        plain = plain or peak
        states = state_bytes * parameters / world
        print(
            f"{layout:<8} {world:>5} {peak / 2**20:>9.0f} MB {states / 2**20:>10.0f} MB {peak / plain:>13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
