"""Sharding of a run's states on each engine, and the collectives of a step with their bytes.

engines/settings.py names the layout class of each engine; DeepSpeed's is in zero.py. Collectives follow the engines:
ddp's own buckets, FSDP2's units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import check_engine
from trp_scale.engines.ddp import BUCKET_BYTES, ReducedParameter, cut_into_buckets
from trp_scale.models.tensor_plan import declared_plan
from trp_scale.planning.clusters import Cluster
from trp_scale.planning.counting import Checkpointing, Collective, Counted, degrees
from trp_scale.training.micro_size import BESIDE_GRAPHS, WORKSPACE, static_gradient_bytes

MASTER = 4
"""Bytes per number of the optimizer: fp32 weights, gradients and moments."""

BYTES_OF = {"fp32": 4, "bf16": 2}
"""Bytes per number, by dtype."""


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """Part of the layout that the command line fixes.

    Attributes:
        engine: `None` = try all.
        document, path: DeepSpeed's file; `None` = try the shipped files.
    """

    engine: str | None = None
    document: Mapping[str, Any] | None = None
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of one rank in a step, by purpose. `captured`: static memory of CUDA graphs, and what a pass without
    graphs needs while they keep their pool."""

    weights: float
    gradients: float
    moments: float = 0.0
    gathered: float = 0.0
    buckets: float = 0.0
    activations: float = 0.0
    masks: float = 0.0
    hooks: float = 0.0
    captured: float = 0.0
    workspace: float = float(WORKSPACE)
    host: float = 0.0

    @property
    def device(self) -> float:
        """Bytes on the GPU."""
        return float(sum(getattr(self, field_.name) for field_ in fields(self) if field_.name != "host"))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Engine and sharding of a plan. This base class describes engines with full replicas.

    Attributes:
        engine: value of --engine.
        checkpointing: training.activation_checkpointing.
        read, sent: bytes of a weight in forward passes, and of a communicated gradient.
    """

    engine: str
    checkpointing: Checkpointing = "none"
    read: int = 4
    sent: int = 4

    @classmethod
    def is_tried(cls, gpus: int) -> bool:
        """Return whether a plan tries these layouts if no engine is named."""
        return gpus > 1

    @classmethod
    def candidates(cls, engine: str, counted: Counted, cluster: Cluster, choices: LayoutChoice) -> Iterator[Layout]:
        """Yield the layouts that the settings allow; layouts that differ only in checkpointing are consecutive, the
        fastest first.

        Args:
            engine: registered name of this class.
            choices: provides DeepSpeed's file.

        Raises:
            RefusedError: the settings are refused, or their cost cannot be predicted.
        """
        yield from cls(engine=engine, **sizes(counted.config)).ways(counted.config)

    def ways(self, config: Config) -> Iterator[Layout]:
        """Yield this layout with each activation checkpointing that the recipe allows."""
        stated = config.training.activation_checkpointing
        ways: tuple[Checkpointing, ...] = (stated,) if stated != "none" else ("none", "full")
        for way in ways:
            yield replace(self, checkpointing=way)

    def is_stated(self, config: Config) -> bool:
        """Return whether a run with these settings has this layout."""
        return self.checkpointing == config.training.activation_checkpointing

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.label if self.checkpointing == "none" else f"{self.label}, {self.checkpointing} checkpointing"

    @property
    def label(self) -> str:
        """Name without activation checkpointing."""
        return self.engine

    @property
    def flags(self) -> str:
        """Flags that select this layout, each after a space."""
        return ""

    @property
    def rounded(self) -> bool:
        """Whether forward passes read bf16 weights instead of autocast."""
        return self.read < MASTER

    @property
    def compiles(self) -> bool:
        """Whether blocks can be compiled."""
        return self.checkpointing != "selective"

    def command(self, flags: str, gpus: int, per_node: int) -> str:
        """Return the command that starts a run with these flags on each node."""
        nodes = ""
        if gpus > per_node:
            nodes = f"--nnodes {-(-gpus // per_node)} --rdzv_backend c10d --rdzv_endpoint HOST:29500 "
        processes = f"--nproc_per_node {min(gpus, per_node)}"
        return f"torchrun {nodes}{processes} launch/pretrain.py --engine {self.engine} {flags}"

    def part(self, counted: Counted) -> Counted:
        """Return the counts of a rank's part of the model."""
        return counted

    def data_ranks(self, ranks: int) -> int:
        """Return the number of ranks that split the batch."""
        return ranks

    def sharers(self, ranks: int) -> int:
        """Return the number of ranks that share the weights, and hook tensors of their size."""
        return 1

    def updated(self, counted: Counted, ranks: int) -> float:
        """Return the number of parameters that a rank updates."""
        return self.part(counted).parameters / self.sharers(ranks)

    def host_bytes(self, accumulation: int) -> int:
        """Return the bytes between GPU and host per step and updated parameter; 0 if all is on the GPU."""
        return 0

    def network_bytes(self, numbers: int, ranks: int) -> float:
        """Return the bytes of a masking network: weights, gradient, two moments, and initial weights."""
        return 5 * MASTER * numbers / self.sharers(ranks)

    def states(self, counted: Counted, ranks: int, *, several: bool) -> dict[str, float]:
        """Return the fields of Memory that do not depend on the number of rows. `several`: whether a step has several
        micro-batches."""
        every = counted.parameters
        copy = self.read * every if self.rounded else 0
        return {"weights": MASTER * every + copy, "gradients": MASTER * every, "moments": MASTER * counted.moments}

    def collectives(self, counted: Counted, ranks: int, micro: int, accumulation: int) -> Iterator[Collective]:
        """Yield the collectives of a step on several ranks; arguments as of `traffic`."""
        tasks = len(counted.outline.objective.tasks)
        yield Collective(kind="all-reduce", size=8 * (tasks + 2), phase="start")  # counts, wishes to stop
        yield Collective(kind="all-reduce", size=16 * tasks, phase="update")  # losses
        if counted.config.optimizer.kind == "muon":
            # All-to-alls, which a rank waits for: parts of matrices to their owners, and results back. Replicas need
            # only the second, with all results for each rank.
            size = counted.block_elements * (MASTER if counted.config.training.precision == "fp32" else MASTER // 2)
            share, times = (size, 1) if self.updated(counted, ranks) == counted.parameters else (size // ranks, 2)
            yield Collective(kind="gather", size=share, phase="update", times=times, hides=False)


def sizes(config: Config) -> dict[str, Any]:
    """Return `read` and `sent` of an engine that follows the recipe."""
    return {"read": BYTES_OF[config.training.weights], "sent": BYTES_OF[config.training.gradients]}


def norms(counted: Counted, *, ranks: int = 0, of_each: bool = True) -> Iterator[Collective]:
    """Yield the all-reduce of the gradient's norm and, with `of_each` and LAMB, of all matrices' norms."""
    yield Collective(kind="all-reduce", size=8, phase="update", ranks=ranks)
    if of_each and counted.config.optimizer.kind == "lamb":
        number = len(list(counted.model.parameters()))
        yield Collective(kind="all-reduce", size=16 * number, phase="update", ranks=ranks)


class PlainLayout(Layout):
    """One process."""

    @classmethod
    def is_tried(cls, gpus: int) -> bool:
        return gpus == 1

    def command(self, flags: str, gpus: int, per_node: int) -> str:
        return f"trp-scale pretrain {flags}"


class DdpLayout(Layout):
    """Full replicas with flat gradient buckets."""

    def states(self, counted: Counted, ranks: int, *, several: bool) -> dict[str, float]:
        states = super().states(counted, ranks, several=several)
        if ranks == 1:
            return states
        # Flat buckets persist; gradients of earlier micro-batches need memory until they are packed.
        gradient_bytes = states["gradients"] if several else min(states["gradients"], BUCKET_BYTES)
        return {**states, "gradients": gradient_bytes, "buckets": self.sent * counted.parameters}

    def collectives(self, counted: Counted, ranks: int, micro: int, accumulation: int) -> Iterator[Collective]:
        yield from super().collectives(counted, ranks, micro, accumulation)
        for numbers in bucket_sizes(counted.model, self.sent):
            yield Collective(kind="all-reduce", size=self.sent * numbers, phase="last")


def bucket_sizes(model: nn.Module, sent: int) -> Iterator[int]:
    """Yield the number of elements of each ddp gradient bucket; `sent` bytes per element."""
    members = [ReducedParameter(read=weight, own=weight) for weight in model.parameters() if weight.requires_grad]
    for bucket in cut_into_buckets(members, BUCKET_BYTES, torch.bfloat16 if sent < MASTER else None):
        yield bucket.flat.numel()


@dataclass(frozen=True, kw_only=True)
class FsdpLayout(Layout):
    """FSDP2.

    Attributes:
        shard_ranks: consecutive ranks that shard one copy; 0 = all ranks.
        offload: weights, gradients and moments are in host memory.
    """

    shard_ranks: int = 0
    offload: bool = False

    @classmethod
    def candidates(cls, engine: str, counted: Counted, cluster: Cluster, choices: LayoutChoice) -> Iterator[Layout]:
        config, settings = counted.config, counted.config.fsdp
        gpus, per_node = cluster.gpus, cluster.gpu.per_node
        if settings.offload_directory:
            raise RefusedError(
                f"--fsdp.offload_directory {settings.offload_directory}: the speed of its disk is unknown; "
                "allowed in a plan: --fsdp.offload without it"
            )
        groups = (0, per_node) if gpus > per_node and gpus % per_node == 0 else (0,)
        if stated := settings.shard_ranks:
            if gpus % stated:
                raise RefusedError(
                    f"--fsdp.shard_ranks is {stated}, allowed: a divisor of the {gpus} ranks, or 0 for all"
                )
            groups = (stated if stated < gpus else 0,)
        for ranks in groups:
            layout = cls(engine=engine, shard_ranks=ranks, offload=settings.offload, **sizes(config))
            yield from layout.ways(config)

    @property
    def label(self) -> str:
        groups = f" in groups of {self.shard_ranks}" if self.shard_ranks else ""
        return self.engine + groups + (" offload" if self.offload else "")

    @property
    def flags(self) -> str:
        groups = f" --fsdp.shard_ranks {self.shard_ranks}" if self.shard_ranks else ""
        return groups + (" --fsdp.offload True" if self.offload else "")

    def sharers(self, ranks: int) -> int:
        return self.shard_ranks or ranks

    def host_bytes(self, accumulation: int) -> int:
        """Return the bytes: weights are copied for both passes of each micro-batch, gradients once."""
        return MASTER * (2 * accumulation + 1) if self.offload else 0

    def states(self, counted: Counted, ranks: int, *, several: bool) -> dict[str, float]:
        if ranks == 1:
            return super().states(counted, ranks, several=several)
        every, block = counted.parameters, max(counted.blocks, default=0)
        shard, whole = MASTER * every / self.sharers(ranks), MASTER * (every if several else counted.rest)
        moments = MASTER * counted.moments / self.sharers(ranks)
        shards = {"weights": shard, "gradients": shard + whole, "moments": moments}
        if self.offload:
            shards = {"weights": 0.0, "gradients": whole, "host": 2 * shard + moments}
        # Reductions of two blocks are pending while weights are gathered; the rest's start after those are freed.
        gathered = self.read * (counted.rest + 2 * block)
        buckets = max(2 * self.sent * block, self.sent * counted.rest - gathered)
        return {**shards, "gathered": gathered, "buckets": buckets}

    def collectives(self, counted: Counted, ranks: int, micro: int, accumulation: int) -> Iterator[Collective]:
        """Yield the collectives: gathers of blocks in the forward and backward pass of each micro-batch, of the rest
        once; reductions of gradients once per step, then all-reduces between replicas."""
        yield from super().collectives(counted, ranks, micro, accumulation)
        yield from norms(counted)
        near = self.sharers(ranks)
        gathers = {"forward": [counted.rest, *counted.blocks], "backward": counted.blocks}
        for phase, numbers in gathers.items():
            for size in numbers:
                yield Collective(kind="gather", size=self.read * size, phase=phase, times=accumulation, ranks=near)
        for size in (*counted.blocks, counted.rest):
            yield Collective(kind="scatter", size=self.sent * size, phase="last", ranks=near)
            if near < ranks:
                part = self.sent * size // near
                yield Collective(kind="all-reduce", size=part, phase="last", ranks=ranks // near, apart=near)


@dataclass(frozen=True, kw_only=True)
class MegatronLayout(Layout):
    """Tensor parallelism.

    Attributes:
        tensor: ranks that share each large matrix.
        shard_moments: megatron.shard_moments.
        split: whether they split tokens (sequence parallelism).
    """

    tensor: int = 1
    shard_moments: bool = True
    split: bool = False

    @classmethod
    def is_tried(cls, gpus: int) -> bool:
        return False

    @classmethod
    def candidates(cls, engine: str, counted: Counted, cluster: Cluster, choices: LayoutChoice) -> Iterator[Layout]:
        """Yield the layout of the stated tensor-parallel degree, or of each allowed degree if it is 1."""
        config, stated = counted.config, counted.config.megatron.tensor_parallel
        gpus, per_node = cluster.gpus, cluster.gpu.per_node
        check_engine(replace(config, batch=replace(config.batch, micro_size=1)), engine, gpu=True)
        allowed = list(degrees(declared_plan(counted.model), gpus, per_node))
        if stated > 1 and stated not in allowed:
            raise RefusedError(
                f"--megatron.tensor_parallel is {stated}; allowed for this model on {gpus} GPUs in nodes of "
                f"{per_node}: {', '.join(map(str, allowed))}"
            )
        for tensor in [stated] if stated > 1 else allowed:
            yield cls(
                engine=engine,
                tensor=tensor,
                shard_moments=config.megatron.shard_moments,
                split=config.megatron.sequence_parallel,
                **sizes(config),
            )

    def is_stated(self, config: Config) -> bool:
        return super().is_stated(config) and self.tensor == config.megatron.tensor_parallel

    @property
    def label(self) -> str:
        return f"{self.engine} TP {self.tensor}" + (" SP" if self.split else "")

    @property
    def flags(self) -> str:
        ranks = f" --megatron.tensor_parallel {self.tensor}" if self.tensor > 1 else ""
        return ranks + (" --megatron.sequence_parallel True" if self.split else "")

    @property
    def compiles(self) -> bool:
        return False

    def part(self, counted: Counted) -> Counted:
        return counted.over(self.tensor, self.split)

    def data_ranks(self, ranks: int) -> int:
        return ranks // self.tensor

    def sharers(self, ranks: int) -> int:
        """Return the number of ranks that shard the moments."""
        return self.data_ranks(ranks) if self.shard_moments else 1

    def network_bytes(self, numbers: int, ranks: int) -> float:
        """Return the bytes: the whole network on each rank, and its shard of the moments."""
        return (3 + 2 / self.sharers(ranks)) * MASTER * numbers

    def states(self, counted: Counted, ranks: int, *, several: bool) -> dict[str, float]:
        if ranks == 1:
            return super().states(counted, ranks, several=several)
        every, share, data = self.part(counted).parameters, self.sharers(ranks), self.data_ranks(ranks)
        masters = MASTER * every / share if self.rounded else 0
        gradient_bytes = MASTER * every if several or data == 1 else min(MASTER * every, BUCKET_BYTES)
        flat = self.sent * every if data > 1 else 0
        gathering = self.read * min(every, BUCKET_BYTES // MASTER) if share > 1 else 0
        return {
            "weights": self.read * every + masters,
            "gradients": gradient_bytes,
            "moments": 2 * MASTER * every / share,
            "buckets": flat + (self.sent * every / share if share > 1 else 0) + gathering,
        }

    def collectives(self, counted: Counted, ranks: int, micro: int, accumulation: int) -> Iterator[Collective]:
        """Yield the collectives: sums over tensor-parallel ranks in every pass; over data ranks, gradients once per
        step, and new weights if moments are sharded."""
        part, data = self.part(counted), self.data_ranks(ranks)
        among: dict[str, Any] = {"ranks": data, "apart": self.tensor}
        inside: dict[str, Any] = {"ranks": self.tensor, "hides": False}
        shared = self.sharers(ranks) > 1
        counts, losses = super().collectives(counted, ranks, micro, accumulation)
        yield counts
        if data > 1:
            yield replace(losses, **among)
        if shared or self.tensor > 1:
            yield from norms(part if self.tensor == 1 else counted, ranks=ranks if shared else self.tensor)
        sums = part.tensor_sums(micro, self.rounded) if self.tensor > 1 else []
        for message, times in Counter(sums).items():
            yield replace(message, times=times * accumulation, **inside)
        if self.split:
            yield Collective(kind="all-reduce", size=MASTER * counted.partial(part), phase="last", **inside)
        if data == 1:
            return
        for numbers in bucket_sizes(part.model, self.sent):
            if shared:
                yield Collective(kind="scatter", size=self.sent * numbers, phase="last", **among)
                yield Collective(kind="gather", size=self.read * numbers, phase="update", **among)
            else:
                yield Collective(kind="all-reduce", size=self.sent * numbers, phase="last", **among)


def traffic(counted: Counted, layout: Layout, *, ranks: int, micro: int, accumulation: int) -> list[Collective]:
    """Return the collectives of a step on all ranks, except those of hooks.

    Args:
        micro: rows of a micro-batch.
        accumulation: micro-batches of a step.
    """
    return [] if ranks == 1 else list(layout.collectives(counted, ranks, micro, accumulation))


def memory(counted: Counted, layout: Layout, *, ranks: int, micro: int, accumulation: int) -> Memory:
    """Return the memory of one rank; arguments as of `traffic`."""
    part = layout.part(counted)
    # Learned masks: copy of the weights and direction; weight_average: the average.
    copies = 2 * bool(counted.network) + ("weight_average" in counted.config.hooks)
    saved, config = part.saved(layout.checkpointing, layout.rounded), counted.config
    static = static_gradient_bytes(config, layout.sharers(ranks)) * part.parameters
    return Memory(
        activations=saved.step_bytes(micro),
        captured=static + BESIDE_GRAPHS * saved.row * micro * (config.training.capture == "on"),
        masks=layout.network_bytes(counted.network, ranks),
        hooks=copies * MASTER * part.parameters / layout.sharers(ranks),
        **layout.states(counted, ranks, several=accumulation > 1),
    )
