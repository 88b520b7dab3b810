"""What `trp-scale plan` predicts, beside what was counted, measured or published.

    python benchmarks/plan_checks.py [--parts traffic memory published] [--worlds 2 4]

traffic: collectives of a step and bytes a parameter on the wire, over those of BERT 4 x 256 and 8 x 128 on ranks over
gloo, and of masked autoencoders as large whose matrices are cut (benchmarks/wire.py counts them). memory: a rank's
bytes without the planner's workspace, over the peak of the resident set in BERT-base (benchmarks/memory.py); its
activations are those of a CPU's attention.
published: rows a second and GPU on many GPUs over those on few, predicted and as published for models of the same
widths and depths. Of these the first has pre-training of BERT; MPT predicts a next piece at every place, where ours
predicts masked ones.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import memory as measured_memory
from benchmarks import wire
from benchmarks.gpu_setting import ENGINES, deepspeed_document
from benchmarks.workloads import LENGTH, VOCABULARY, set_encoder
from trp_scale.config.loader import load_recipe
from trp_scale.planning.clusters import GPUS, Cluster
from trp_scale.planning.counting import Counted
from trp_scale.planning.layouts import Layout, LayoutChoice, MegatronLayout, memory, sizes, traffic
from trp_scale.planning.plan import best, layouts
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.micro_size import WORKSPACE

Part = Literal["traffic", "memory", "published"]


@dataclass(kw_only=True)
class Options:
    """What to check."""

    parts: list[Part] = field(default_factory=lambda: ["traffic", "memory", "published"])
    """Which."""
    worlds: list[int] = field(default_factory=lambda: [2, 4])
    """Ranks that traffic is counted on."""


def layout_of(name: str, counted: Counted, gpus: int) -> Layout:
    """That of an engine by its name in benchmarks/wire.py: its file is the shipped one, where there is one."""
    if name in wire.TENSOR:
        config = counted.config
        moments, split = config.megatron.shard_moments, name.endswith("sp")
        return MegatronLayout(
            engine="megatron", tensor=wire.TENSOR[name], shard_moments=moments, split=split, **sizes(config)
        )
    stage = ENGINES[name]
    if stage is None:
        given = LayoutChoice(engine=name)
    else:
        given = LayoutChoice(engine="deepspeed", document=deepspeed_document(stage), path=name)
    return next(layouts(counted, Cluster(gpu=GPUS["h100"], gpus=gpus), given))


def predicted(name: str, options: wire.Options, world: int, accumulation: int) -> tuple[int, int, int]:
    """Collectives of a step and bytes on the wire, and the model's parameters."""
    work = wire.workload(options, world // wire.TENSOR.get(name, 1), accumulation)
    counted = Counted(work.config, DataFacts(length=LENGTH, vocabulary=VOCABULARY))
    layout = layout_of(name, counted, world)
    messages = traffic(counted, layout, ranks=world, micro=options.rows, accumulation=accumulation)
    sent = sum(each.size * each.times * (2 if each.kind == "all-reduce" else 1) for each in messages)
    return sum(each.times for each in messages), sent, counted.parameters


def traffic_over_counted(layers: int, hidden_size: int, world: int) -> None:
    """Print a line for each engine and number of micro-batches."""
    options = wire.Options(layers=layers, hidden_size=hidden_size, rows=4)
    print(f"\ntraffic of BERT {layers} x {hidden_size} on {world} ranks: predicted, counted")
    compare_traffic(options, world)
    print(f"of a masked autoencoder {layers} x {hidden_size}:")
    compare_traffic(replace(options, model="mae", engines=list(wire.TENSOR)), world)
    if world > 2:
        print(f"fsdp in groups of {world // 2}:")
        compare_traffic(replace(options, engines=["fsdp"], shard_ranks=world // 2), world)


def compare_traffic(options: wire.Options, world: int) -> None:
    """A line for each engine and number of micro-batches."""
    for name, (counts, _) in wire.measure_engines(world, options):
        for accumulation, (calls, payload) in zip(wire.ACCUMULATIONS, counts, strict=True):
            number, sent, parameters = predicted(name, options, world, accumulation)
            calls_counted = sum(calls.values())
            bytes_counted = sum(payload.values()) + payload.get("all-reduce", 0)
            collectives = f"{number:>4} {calls_counted:>4} ({number / calls_counted:.2f})"
            wire_bytes = f"{sent / parameters:6.2f} {bytes_counted / parameters:6.2f} ({sent / bytes_counted:.3f})"
            print(f"{name:<6} {accumulation} micro-batches  collectives {collectives}  bytes a parameter {wire_bytes}")


def memory_over_measured() -> None:
    """Print a line for each layout of benchmarks/memory.py."""
    options = measured_memory.Options()
    print(f"\nmemory of a rank, BERT {options.layers} x {options.hidden_size}: predicted, measured, in MB")
    for name, (engine, world, _) in measured_memory.LAYOUTS.items():
        found = measured_memory.on_layout(name, measured_memory.measure, options)
        peak = max(each for each, _ in found) / 2**20
        config = measured_memory.settings(options, world)
        counted = Counted(config, DataFacts(length=LENGTH, vocabulary=VOCABULARY))
        layout = layout_of("plain" if engine == "plain" else name, counted, world)
        rows = measured_memory.ROWS
        predicted = memory(counted, layout, ranks=world, micro=rows, accumulation=1).device - WORKSPACE
        print(f"{name:<6} {predicted / 2**20:6.0f} {peak:6.0f} ({predicted / 2**20 / peak:.2f})", flush=True)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Scaling of a model from `few` to `many` GPUs.

    Attributes:
        source: publication.
        sizes: layers and width.
        micro: rows of a micro-batch.
        rows: of a step on few and on many GPUs.
        half: bf16 weights.
        scaling: published rows a second and GPU on many over few.
    """

    source: str
    sizes: tuple[int, int]
    micro: int
    scaling: float
    rows: tuple[int, int]
    length: int = 2048
    gpu: str = "a100-40"
    few: int = 16
    many: int = 128
    engine: str = "fsdp"
    half: bool = True


MPT = (
    ("125m", (12, 768), 26, 123936 / 130535),
    ("350m", (24, 1024), 18, 51934 / 55413),
    ("760m", (24, 1536), 12, 28940 / 29607),
)
LLM_FOUNDRY = "llm-foundry, scripts/train/benchmarking, A100 40GB, 1600 Gbps"
BERT_LARGE = Published(
    source="NVIDIA's BERT-large, batch 64k",
    sizes=(24, 1024),
    micro=64,
    scaling=0.949,
    rows=(65536, 65536),
    length=128,
    gpu="a100-80",
    few=8,
    many=256,
    engine="ddp",
    half=False,
)
PUBLISHED = [BERT_LARGE] + [
    Published(
        source=f"{LLM_FOUNDRY}, {name}", sizes=sizes, micro=micro, scaling=scaling, rows=(16 * micro, 128 * micro)
    )
    for name, sizes, micro, scaling in MPT
]


def scaling(point: Published) -> tuple[float, float]:
    """Predicted: rows a second and GPU on many over few; and the use of the peak on few."""
    config = load_recipe("pos_bert_large")
    assert isinstance(config, PosBertConfig)
    set_encoder(config.model, *point.sizes).max_positions = point.length
    config.data.path, config.training.precision = "(none)", "bf16"
    if point.half:
        config.training.weights = config.training.gradients = "bf16"
    config.batch.micro_size = point.micro
    speeds, used = [], 0.0
    for gpus, rows in zip((point.few, point.many), point.rows, strict=True):
        config.batch.global_size = rows
        counted = Counted(config, DataFacts(length=point.length))
        cluster = Cluster(gpu=GPUS[point.gpu], gpus=gpus)
        layout = next(layouts(counted, cluster, LayoutChoice(engine=point.engine)))
        plan = best(counted, layout, cluster, [point.micro])
        if plan.step is None:
            raise SystemExit(f"{point.source}: {plan.short / 2**30:.1f} GiB do not fit on {gpus} x {point.gpu}")
        speeds.append(plan.rows_a_second / gpus)
        used = used or plan.step.flops
    return speeds[1] / speeds[0], used


def published() -> None:
    """Print a line for each."""
    print("\nscaling from few GPUs to many: predicted, published")
    for point in PUBLISHED:
        found, used = scaling(point)
        print(
            f"{found:6.1%} {point.scaling:6.1%} ({found - point.scaling:+.1%})  {point.few} to {point.many}, "
            f"{used:.0%} of the peak on {point.few}: {point.source}",
            flush=True,
        )


def main(options: Options) -> None:
    """Print all parts."""
    if "traffic" in options.parts:
        for world in options.worlds:
            for layers, hidden_size in ((4, 256), (8, 128)):
                traffic_over_counted(layers, hidden_size, world)
    if "memory" in options.parts:
        memory_over_measured()
    if "published" in options.parts:
        published()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
