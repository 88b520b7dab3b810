"""GPUs and networks (vendor figures and assumptions), and the command line of `trp-scale plan`.

Links are those of the usual machines of these GPUs: eight per node, all connected by NVLink switches, and one
InfiniBand adapter per GPU. L40S and RTX 4090 have no NVLink and use PCIe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config import PretrainConfig, RefusedError
from trp_scale.config.loader import check
from trp_scale.config.registry import check_settings, setting
from trp_scale.config.run_flags import Arguments, parse_run
from trp_scale.errors import nearest

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """GPU model and its machine.

    Attributes:
        name: value of `--gpu`.
        peak: dense FLOP/s of bf16 matrix products; tf32, fp32: of fp32 matrices with and without TF32.
        memory: bytes.
        memory_rate: bytes/s of its memory.
        link: bytes/s in one direction between a GPU and the others of its node, by NVLink or PCIe.
        network: bytes/s in one direction between a GPU and other nodes.
        cores: CPU cores per GPU.
        host_memory: bytes of host memory per GPU.
        source: origin of the figures.
        per_node: GPUs per node.
    """

    name: str
    peak: float
    tf32: float
    fp32: float
    memory: int
    memory_rate: float
    link: float
    network: float
    cores: int
    host_memory: int
    source: str
    per_node: int = 8


DGX = "DGX {0} data sheet: 8 adapters of {1} Gb/s, {2} cores, {3} TB"
A100 = f"NVIDIA A100 data sheet (SXM4); {DGX.format('A100', 200, 128, '1 or 2')}"
H100, H200 = (f"NVIDIA {n} data sheet (SXM5), dense; {DGX.format(n, 400, 112, 2)}" for n in ("H100", "H200"))
B200 = f"NVIDIA HGX B200 data sheet, half of the sparse figures; {DGX.format('B200', 400, 112, 2)}, 1,440 GB at 64 TB/s"
PCIE = "dense; PCIe Gen 4 x16, no NVLink; its machine is assumed"
L40S = f"NVIDIA L40S data sheet, {PCIE}, with 100 Gb/s a GPU"
RTX_4090 = f"NVIDIA Ada GPU architecture white paper, appendix A, {PCIE}, with 100 Gb/s a node, half of PCIe's rate"
"""bf16 products that are summed in fp32. Two of these cards exchange data through host memory."""

_KINDS = (
    # name, FLOP/s in bf16, TF32 and fp32, memory, its rate, rates within a node and between nodes, cores, host, source
    Gpu("a100-40", 312e12, 156e12, 19.5e12, 40 * GIB, 1.555e12, 300e9, 25e9, 16, 128 * GIB, A100),
    Gpu("a100-80", 312e12, 156e12, 19.5e12, 80 * GIB, 2.039e12, 300e9, 25e9, 16, 256 * GIB, A100),
    Gpu("h100", 989e12, 494e12, 67e12, 80 * GIB, 3.35e12, 450e9, 50e9, 14, 256 * GIB, H100),
    Gpu("h200", 989e12, 494e12, 67e12, 141 * 10**9, 4.8e12, 450e9, 50e9, 14, 256 * GIB, H200),
    Gpu("b200", 2250e12, 1100e12, 75e12, 180 * 10**9, 8e12, 900e9, 50e9, 14, 256 * GIB, B200),
    Gpu("l40s", 362e12, 183e12, 91.6e12, 48 * 10**9, 0.864e12, 32e9, 12.5e9, 16, 128 * GIB, L40S),
    Gpu("rtx4090", 165.2e12, 82.6e12, 82.6e12, 24 * GIB, 1.008e12, 16e9, 12.5e9 / 8, 8, 64 * GIB, RTX_4090),
)
GPUS = {gpu.name: gpu for gpu in _KINDS}

SHARE_OF_LINKS = 0.75
"""Share of the slowest link's rate that a large collective achieves."""
HOP, NETWORK_HOP = 1.0e-6, 5.0e-6
"""Seconds of one hop of a ring, within a node and between nodes."""
CALL = 15e-6
"""Fixed seconds of any collective."""
HOST_HOP = 30e-6
"""Seconds of one hop between hosts over TCP, in the ring of the small all-reduce at the start of a step."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`gpus` GPUs of one model, node by node."""

    gpu: Gpu
    gpus: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpu.per_node)

    def seconds(self, kind: str, size: float, ranks: int = 0, apart: int = 1) -> float:
        """Return the seconds of one collective while all groups run theirs. Between nodes, a group's ring has one lane
        per member GPU of a node, each with its own adapter.

        Args:
            kind: all-reduce, gather, scatter (reduce-scatter), reduce (to one rank).
            size: bytes of the whole tensor.
            ranks: size of a group; 0 = all.
            apart: stride between ranks of a group; 1 = neighbours.
        """
        ranks = ranks or self.gpus
        if ranks == 1:
            return 0.0
        members = max(1, self.gpu.per_node // apart)
        nodes = -(-ranks // members)
        rate = self.gpu.link if nodes == 1 else min(self.gpu.link, self.gpu.network * members)
        trips = 2 if kind == "all-reduce" else 1
        moved = size if kind == "reduce" else size * (ranks - 1) / ranks
        hops = (ranks - nodes) * HOP + (nodes - 1) * NETWORK_HOP
        return CALL + trips * (moved / (SHARE_OF_LINKS * rate) + hops)

    def agreement(self) -> float:
        """Return the seconds of the hosts' small all-reduce at the start of a step."""
        return 2 * (self.gpus - 1) * HOST_HOP


def find_gpu(name: str) -> Gpu:
    """Return the GPU that `--gpu` names. Raises RefusedError: unknown name."""
    if name not in GPUS:
        kinds = ", ".join(kind for kind in GPUS if kind.startswith(f"{name}-"))
        problem = f"its kinds are {kinds}" if kinds else f"not known{nearest(name, GPUS)}"
        raise RefusedError(f"--gpu {name}: {problem}; allowed: {', '.join(GPUS)}")
    return GPUS[name]


NO_DATA = "(none)"
"""Placeholder of --data.path in a plan without data."""
NO_MIXTURE = f"first:0.5={NO_DATA},second:0.5={NO_DATA}"
"""Placeholder if the sources are tasks; their number hardly changes the cost."""


@dataclass(kw_only=True)
class PlanArguments(Arguments):
    """Plan a pre-training run on a cluster without a GPU: for each engine, ZeRO stage and activation checkpointing, the
    memory per GPU, the largest micro-batch, the communication and the time of a step; the fastest first, with command
    lines. All other --section.field flags are those of `trp-scale pretrain`; without --data.path the flags give the
    shapes of the data."""

    gpus: int = setting(8, at_least=1)
    """Number of GPUs."""
    gpu: str = "a100-80"
    """a100-40, a100-80, h100, h200, b200, l40s or rtx4090."""
    predict: str = ""
    """Numbers of GPUs for a scaling curve, such as 8,64,256,1024."""
    best: int = setting(5, at_least=1)
    """Number of layouts to list with their commands."""
    length: int = 0
    """Text: tokens per sequence; 0 = --model.max_positions."""
    vocabulary: int = setting(30522, at_least=1)
    """Text: vocabulary size of the tokenizer."""
    semseg_classes: int = setting(133, at_least=1)
    """Images with segmentation maps: number of classes (133 in COCO's panoptic maps, as in MultiMAE)."""
    run_dir: Annotated[Path | None, tyro.conf.Suppress] = None
    resume: Annotated[str, tyro.conf.Suppress] = "auto"
    start_from: Annotated[str, tyro.conf.Suppress] = ""
    dry_run: Annotated[bool, tyro.conf.Suppress] = True
    print_config: Annotated[bool, tyro.conf.Suppress] = False
    local_rank: Annotated[int, tyro.conf.Suppress] = -1

    def worlds(self) -> list[int]:
        """Return the numbers of --predict, ascending; refuse other text."""
        words = [word.strip() for word in self.predict.split(",") if word.strip()]
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise RefusedError(f"--predict {self.predict}: allowed: numbers of GPUs with commas, such as 8,64,256")
        return sorted({int(word) for word in words})


def parse_plan(argv: Sequence[str]) -> PlanArguments:
    """Read and check the command line. Raises RefusedError: as `config.run_flags.parse`; also for invalid numbers."""
    return check_plan(parse_run(argv, PlanArguments, PretrainConfig, prog="trp-scale plan"))


def check_plan(arguments: PlanArguments) -> PlanArguments:
    """Check the settings and flags. Raises as `parse_plan`."""
    arguments.config.data.path = arguments.config.data.path or NO_DATA
    check(arguments.config)
    check_settings(arguments)
    arguments.choose_engine(arguments.gpus)
    arguments.worlds()
    return arguments
