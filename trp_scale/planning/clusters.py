"""GPUs and the networks between them: what their makers state, and what is assumed.

Links are of the machines that these GPUs are mostly sold in: eight to a node, all of them joined by NVLink through
switches, and one network adapter of InfiniBand for each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from trp_scale.errors import RefusedError, nearest

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, and the machine it comes in.

    Attributes:
        name: as `--gpu` has it.
        peak: dense FLOPs a second of matrix products in bf16; tf32, fp32: of fp32 matrices, with and without TF32.
        memory: bytes.
        memory_rate: bytes a second of its memory.
        nvlink: bytes a second in one direction between a GPU and its node's others.
        network: bytes a second in one direction between a GPU and other nodes.
        per_node: GPUs of a node.
        cores: of the node's processors, for each GPU.
        host_memory: bytes of the node's memory for each GPU.
        source: where the figures are from.
    """

    name: str
    peak: float
    tf32: float
    fp32: float
    memory: int
    memory_rate: float
    nvlink: float
    network: float
    per_node: int = 8
    cores: int
    host_memory: int
    source: str


A100_SOURCE = "NVIDIA A100 data sheet (SXM4); DGX A100 data sheet: 8 adapters of 200 Gb/s, 128 cores, 1 or 2 TB"
HOPPER_SOURCE = "NVIDIA {0} data sheet (SXM5), dense; DGX {0} data sheet: 8 adapters of 400 Gb/s, 112 cores, 2 TB"

GPUS: dict[str, Gpu] = {
    "a100-40": Gpu(
        name="a100-40",
        peak=312e12,
        tf32=156e12,
        fp32=19.5e12,
        memory=40 * GIB,
        memory_rate=1.555e12,
        nvlink=300e9,
        network=25e9,
        cores=16,
        host_memory=128 * GIB,
        source=A100_SOURCE,
    ),
    "a100-80": Gpu(
        name="a100-80",
        peak=312e12,
        tf32=156e12,
        fp32=19.5e12,
        memory=80 * GIB,
        memory_rate=2.039e12,
        nvlink=300e9,
        network=25e9,
        cores=16,
        host_memory=256 * GIB,
        source=A100_SOURCE,
    ),
    "h100": Gpu(
        name="h100",
        peak=989e12,
        tf32=494e12,
        fp32=67e12,
        memory=80 * GIB,
        memory_rate=3.35e12,
        nvlink=450e9,
        network=50e9,
        cores=14,
        host_memory=256 * GIB,
        source=HOPPER_SOURCE.format("H100"),
    ),
    "h200": Gpu(
        name="h200",
        peak=989e12,
        tf32=494e12,
        fp32=67e12,
        memory=141 * 10**9,
        memory_rate=4.8e12,
        nvlink=450e9,
        network=50e9,
        cores=14,
        host_memory=256 * GIB,
        source=HOPPER_SOURCE.format("H200"),
    ),
}

SHARE_OF_LINKS = 0.75
"""What a large collective reaches of the slowest link's rate."""
HOP, NETWORK_HOP = 1.0e-6, 5.0e-6
"""Seconds from one GPU to the next of a ring, within a node and between nodes."""
CALL = 15e-6
"""Seconds that any collective takes."""
HOST_HOP = 30e-6
"""Seconds from one host to the next, over TCP: the ranks' agreement at the start of a step is a ring of them."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`gpus` GPUs of one kind, node by node."""

    gpu: Gpu
    gpus: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpu.per_node)

    def seconds(self, kind: str, size: float, ranks: int = 0, apart: int = 1) -> float:
        """Return the seconds of one collective while all groups run theirs. Between nodes a group's ring has as many
        lanes as it has GPUs in a node, each with its adapter.

        Args:
            kind: all-reduce, gather, scatter (each rank gets its part of the sum), reduce (one rank gets it).
            size: bytes of the whole tensor.
            ranks: of a group; 0: all.
            apart: from one rank of a group to the next; 1: neighbours.
        """
        ranks = ranks or self.gpus
        if ranks == 1:
            return 0.0
        members = max(1, self.gpu.per_node // apart)
        nodes = -(-ranks // members)
        rate = self.gpu.nvlink if nodes == 1 else min(self.gpu.nvlink, self.gpu.network * members)
        trips = 2 if kind == "all-reduce" else 1
        moved = size if kind == "reduce" else size * (ranks - 1) / ranks
        hops = (ranks - nodes) * HOP + (nodes - 1) * NETWORK_HOP
        return CALL + trips * (moved / (SHARE_OF_LINKS * rate) + hops)

    def agreement(self) -> float:
        """Seconds of the hosts' small sum at the start of a step."""
        return 2 * (self.gpus - 1) * HOST_HOP


def find_gpu(name: str) -> Gpu:
    """Return the GPU that `--gpu` names.

    Raises:
        RefusedError: there is none of that name.
    """
    if name not in GPUS:
        kinds = ", ".join(kind for kind in GPUS if kind.startswith(f"{name}-"))
        problem = f"its kinds are {kinds}" if kinds else f"not known{nearest(name, GPUS)}"
        raise RefusedError(f"--gpu {name}: {problem}; allowed: {', '.join(GPUS)}")
    return GPUS[name]


def assumptions() -> list[str]:
    """Return the assumptions about clusters, in words."""
    return [
        f"a large collective reaches {SHARE_OF_LINKS:.0%} of the slowest link; nodes of 8 with an adapter for each GPU",
        f"a collective takes {CALL * 1e6:.0f} us, and for each GPU of its ring {HOP * 1e6:.0f} us within a node, "
        f"{NETWORK_HOP * 1e6:.0f} us between nodes",
        f"the hosts' agreement is a ring over TCP, {HOST_HOP * 1e6:.0f} us a hop, while the GPUs still have work",
    ]
