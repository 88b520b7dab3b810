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
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.multiprocessing as multiprocessing
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.steps import micro_batches
from benchmarks.text_steps import LENGTH, text_workload
from trp_scale.config import BatchConfig, OptimizerConfig, TextModelConfig
from trp_scale.config.registry import settings_of
from trp_scale.distributed.environment import Environment
from trp_scale.engines.build import build_engine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

ROWS, STEPS = 2, 3
LAYOUTS = {"plain": ("plain", 1, 16), "fsdp": ("fsdp", 2, 16), "zero3": ("deepspeed", 2, 20)}
"""Engine, ranks, bytes of state a parameter."""
Answer = TypeVar("Answer")
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


def peak_bytes(base: int) -> int:
    """The most memory of this rank so far: what torch allocated on its GPU, or the resident set above `base`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_bytes() - base


def on_ranks(layout: str, measure: Callable[..., Answer], *arguments: object) -> list[Answer]:
    """What `measure(layout, *arguments)` answers on each rank of a layout, in processes of their own: the peak of a
    resident set never falls.

    Raises:
        SystemExit: a rank failed.
    """
    # Read by glibc at the start of the processes: freed tensors go back to the system and leave the resident set.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 17)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    given = (port, layout, measure, arguments, answers)
    processes = [context.Process(target=_start, args=(rank, *given)) for rank in range(LAYOUTS[layout][1])]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise SystemExit(f"{layout}: a rank ended with {failed}")
    return [answers.get() for _ in processes]


def _start(
    rank: int, port: int, layout: str, measure: Callable[..., Answer], arguments: tuple[object, ...], answers: Any
) -> None:
    """One rank of several processes, which the environment tells its place."""
    world = LAYOUTS[layout][1]
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        os.environ.update({name: str(value) for name, value in values.items()})
    torch.set_num_threads(1)
    answers.put(measure(layout, *arguments))


def settings(options: Options, world: int) -> PosBertConfig:
    """Of a run on so many ranks."""
    return PosBertConfig(
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


def measure(layout: str, options: Options) -> tuple[int, int]:
    """A few training steps on one rank: peak bytes, and parameters."""
    engine_name, world, _ = LAYOUTS[layout]
    config = settings(options, world)
    if engine_name == "deepspeed":
        import deepspeed  # noqa: F401  its import belongs to the base line
    with Environment() as environment:
        base = resident_bytes()
        work = text_workload(config)
        parameters = sum(parameter.numel() for parameter in work.module.parameters())
        document = json.loads(ZERO3.read_text()) if engine_name == "deepspeed" else None
        device, group = environment.device, environment.data
        engine = build_engine(engine_name, work.module, config, device=device, data_group=group, ds_document=document)
        batch = micro_batches(work.rows, ROWS)[0].to(device)
        for _ in range(STEPS):
            losses = work.objective(engine, batch)
            engine.backward(losses.sums.sum() / 100, last=True)
            engine.check_gradients()
            engine.step(1e-4)
        peak = peak_bytes(base)
        engine.close()
    return peak, parameters


def main(options: Options) -> None:
    print(f"{'layout':<8} {'ranks':>5} {'peak a rank':>12} {'states alone':>13} {'peak / plain':>13}")
    plain = 0
    for layout, (_, world, state_bytes) in LAYOUTS.items():
        found = on_ranks(layout, measure, options)
        peak, parameters = max(peak for peak, _ in found), found[0][1]
        plain = plain or peak
        states = state_bytes * parameters / world
        print(
            f"{layout:<8} {world:>5} {peak / 2**20:>9.0f} MB {states / 2**20:>10.0f} MB {peak / plain:>13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
