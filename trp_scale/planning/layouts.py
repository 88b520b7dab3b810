"""Where a run's states lie on each engine, and what its ranks send each other: bytes and collectives of a step.

Collectives follow what the engines do: ddp's own buckets, FSDP2's units, DeepSpeed 0.19.8's buckets, partitions and
gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from trp_scale.engines.ddp import BUCKET_BYTES, ReducedParameter, cut_into_buckets
from trp_scale.engines.optimizer import decay_groups
from trp_scale.planning.counting import Checkpointing, Counted
from trp_scale.training.micro_size import WORKSPACE

MASTER = 4
"""Bytes of a number of the optimizer's: weights, gradients and each moment."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An engine with what decides where things lie.

    Attributes:
        engine: as --engine has it.
        stage: of ZeRO; None: another engine's.
        checkpointing: training.activation_checkpointing.
        read, sent: bytes of a weight that forwards read, and of a gradient that travels.
        ds_config: DeepSpeed's file, as the command line would name it.
        zero: its block zero_optimization, resolved.
        shard_ranks: FSDP2: neighbours that share one copy; 0: all ranks.
        offload: FSDP2: weights, gradients and moments are in host memory.
        tensor: ranks that share each large matrix.
        shard_moments: megatron.shard_moments.
        split: whether they split tokens.
    """

    engine: str
    stage: int | None = None
    checkpointing: Checkpointing = "none"
    read: int = 4
    sent: int = 4
    ds_config: str = ""
    zero: Mapping[str, Any] | None = None
    shard_ranks: int = 0
    offload: bool = False
    tensor: int = 1
    shard_moments: bool = True
    split: bool = False

    @property
    def name(self) -> str:
        """Name for tables."""
        engine = self.engine if self.stage is None else f"ZeRO-{self.stage}"
        if self.shard_ranks:
            engine += f" in groups of {self.shard_ranks}"
        if self.engine == "megatron":
            engine += f" TP {self.tensor}" + (" SP" if self.split else "")
        if self.offloads:
            engine += " offload"
        return engine if self.checkpointing == "none" else f"{engine}, {self.checkpointing} checkpointing"

    @property
    def offloads(self) -> bool:
        """Whether moments, and the weights' masters, are in host memory."""
        if self.offload:
            return True
        block = (self.zero or {}).get("offload_optimizer") or {}
        return bool(block.get("device", "none") != "none")

    @property
    def rounded(self) -> bool:
        """Whether forwards read bf16 weights in place of autocast."""
        return self.read < MASTER

    @property
    def compiles(self) -> bool:
        """Whether blocks can be compiled."""
        return self.stage != 3 and self.checkpointing != "selective" and self.engine != "megatron"

    def data_ranks(self, ranks: int) -> int:
        """Return the number of ranks that split the batch."""
        return ranks // self.tensor

    def sharing(self, ranks: int) -> int:
        """Ranks that share the moments of what one of them has, where --engine megatron has cut the matrices."""
        return self.data_ranks(ranks) if self.shard_moments else 1

    def sharers(self, ranks: int) -> int:
        """Ranks that weights are sharded over, of an engine that shards them."""
        return self.shard_ranks or ranks

    def key(self, name: str) -> int:
        """A number of DeepSpeed's block."""
        return int((self.zero or {})[name])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at the peak of a step, by what they are of."""

    weights: float
    gradients: float
    moments: float
    gathered: float = 0.0
    buckets: float = 0.0
    activations: float = 0.0
    masks: float = 0.0
    hooks: float = 0.0
    workspace: float = float(WORKSPACE)
    host: float = 0.0

    @property
    def device(self) -> float:
        """Bytes on the GPU."""
        return float(sum(getattr(self, field_.name) for field_ in fields(self) if field_.name != "host"))


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Several alike.

    Attributes:
        kind, ranks, apart: as in Cluster.seconds.
        size: bytes of the whole tensor.
        phase: forward, backward (of each micro-batch), last (the window's last backward pass), or update.
        times: how many.
        hides: whether it can pass behind arithmetic; what ranks that share matrices sum is needed at once.
    """

    kind: str
    size: int
    phase: str
    times: int = 1
    ranks: int = 0
    apart: int = 1
    hides: bool = True


def traffic(counted: Counted, layout: Layout, *, ranks: int, micro: int, accumulation: int) -> list[Collective]:
    """The collectives of a step on all ranks. Those of hooks are not among them.

    Args:
        micro: rows of a micro-batch.
        accumulation: micro-batches of a step.
    """
    if ranks == 1:
        return []
    if layout.engine == "megatron":
        return list(_megatron(counted, layout, ranks, micro, accumulation))
    tasks = len(counted.outline.objective.tasks)
    messages = [
        Collective(kind="all-reduce", size=8 * (tasks + 2), phase="start"),  # counts, wishes to stop
        Collective(kind="all-reduce", size=16 * tasks, phase="update"),  # losses
    ]
    if layout.engine != "ddp":
        messages.append(Collective(kind="all-reduce", size=8, phase="update"))  # the gradient's norm
    if counted.config.optimizer.kind == "lamb" and layout.engine != "ddp" and layout.stage != 0:
        number = len(list(counted.model.parameters()))
        messages.append(Collective(kind="all-reduce", size=16 * number, phase="update"))  # norms of all matrices
    by_engine = {"ddp": _ddp, "fsdp": _fsdp}
    by_stage = {0: _zero_0, 1: _zero_1_and_2, 2: _zero_1_and_2, 3: _zero_3}
    make = by_engine[layout.engine] if layout.stage is None else by_stage[layout.stage]
    return [*messages, *make(counted, layout, ranks, accumulation)]


def _ddp(counted: Counted, layout: Layout, ranks: int, accumulation: int) -> Iterator[Collective]:
    members = [
        ReducedParameter(read=parameter, own=parameter)
        for parameter in counted.model.parameters()
        if parameter.requires_grad
    ]
    for bucket in cut_into_buckets(members, BUCKET_BYTES, torch.bfloat16 if layout.sent < MASTER else None):
        yield Collective(kind="all-reduce", size=layout.sent * bucket.flat.numel(), phase="last")


def _megatron(counted: Counted, layout: Layout, ranks: int, micro: int, accumulation: int) -> Iterator[Collective]:
    """Sums over the ranks that share matrices in every pass. Over those that split the batch, gradients once a window,
    and new weights where each updates rows of its own."""
    part, data = counted.over(layout.tensor, layout.split), layout.data_ranks(ranks)
    tasks = len(counted.outline.objective.tasks)
    yield Collective(kind="all-reduce", size=8 * (tasks + 2), phase="start")
    shared = layout.sharing(ranks) > 1
    among: dict[str, Any] = {"ranks": data, "apart": layout.tensor}
    inside: dict[str, Any] = {"ranks": layout.tensor, "hides": False}
    if data > 1:
        yield Collective(kind="all-reduce", size=16 * tasks, phase="update", **among)
    if shared or layout.tensor > 1:
        norms = ranks if shared else layout.tensor
        yield Collective(kind="all-reduce", size=8, phase="update", ranks=norms)
        if counted.config.optimizer.kind == "lamb":
            number = len(list(part.model.parameters()))
            yield Collective(kind="all-reduce", size=16 * number, phase="update", ranks=norms)
    sums = part.tensor_sums(micro, layout.rounded) if layout.tensor > 1 else []
    for message, times in Counter(sums).items():
        yield Collective(
            kind=message.kind, size=message.size, phase=message.phase, times=times * accumulation, **inside
        )
    if layout.split:
        yield Collective(kind="all-reduce", size=MASTER * counted.partial(part), phase="last", **inside)
    if data == 1:
        return
    members = [ReducedParameter(read=parameter, own=parameter) for parameter in part.model.parameters()]
    for bucket in cut_into_buckets(members, BUCKET_BYTES, torch.bfloat16 if layout.sent < MASTER else None):
        numbers = bucket.flat.numel()
        if shared:
            yield Collective(kind="scatter", size=layout.sent * numbers, phase="last", **among)
            yield Collective(kind="gather", size=layout.read * numbers, phase="update", **among)
        else:
            yield Collective(kind="all-reduce", size=layout.sent * numbers, phase="last", **among)


def _fsdp(counted: Counted, layout: Layout, ranks: int, accumulation: int) -> Iterator[Collective]:
    """Blocks are gathered in the forward pass and again in the backward pass of each micro-batch, the rest once;
    gradients go once a window, then each part between the copies."""
    near = layout.sharers(ranks)
    gathers = {"forward": [counted.rest, *counted.blocks], "backward": counted.blocks}
    for phase, sizes in gathers.items():
        for size in sizes:
            yield Collective(kind="gather", size=layout.read * size, phase=phase, times=accumulation, ranks=near)
    for size in (*counted.blocks, counted.rest):
        yield Collective(kind="scatter", size=layout.sent * size, phase="last", ranks=near)
        if near < ranks:
            part = layout.sent * size // near
            yield Collective(kind="all-reduce", size=part, phase="last", ranks=ranks // near, apart=near)


def _zero_0(counted: Counted, layout: Layout, ranks: int, accumulation: int) -> Iterator[Collective]:
    """After the backward pass, in pieces of DeepSpeed's default of 5 10^8 numbers."""
    numbers, most = counted.parameters, 500_000_000
    while numbers > 0:
        yield Collective(kind="all-reduce", size=layout.sent * min(numbers, most), phase="update")
        numbers -= most


def _zero_1_and_2(counted: Counted, layout: Layout, ranks: int, accumulation: int) -> Iterator[Collective]:
    """Gradients go bucket by bucket, each part to the rank that owns it: on stage 1 in the window's last backward pass,
    on stage 2 in every one. New weights are gathered after the update, each group of parameters by one collective."""
    groups = _groups(counted.model)
    owners = _Owners(groups, ranks)
    for bucket in in_buckets(_last_to_first(counted.model), layout.key("reduce_bucket_size")):
        parts: dict[int, int] = {}
        for parameter in bucket:
            for rank, size in owners.of(parameter):
                parts[rank] = parts.get(rank, 0) + size
        for size in parts.values():
            if layout.stage == 1:
                yield Collective(kind="reduce", size=layout.sent * size, phase="last")
            else:
                yield Collective(kind="reduce", size=layout.sent * size, phase="backward", times=accumulation)
    for group in groups:
        size = layout.read * sum(tensor.numel() for tensor in group)
        yield Collective(kind="gather", size=size, phase="update")


def _zero_3(counted: Counted, layout: Layout, ranks: int, accumulation: int) -> Iterator[Collective]:
    """Blocks are gathered whole, other parameters one by one, forward and backward. The last block stays for its
    backward pass. So does the largest of the others, which the model's end asks for again. Small ones stay on every
    rank, and tensor is gathered by itself after the update."""
    small = layout.key("stage3_param_persistence_threshold")
    of_blocks = {id(tensor) for layer in counted.model.layers for tensor in layer.parameters()}  # type: ignore[union-attr]
    blocks = [
        sum(tensor.numel() for tensor in layer.parameters() if tensor.numel() > small)
        for layer in counted.model.layers  # type: ignore[union-attr]
    ]
    others = sorted(
        tensor.numel()
        for tensor in counted.model.parameters()
        if id(tensor) not in of_blocks and tensor.numel() > small
    )
    gathers = {"forward": [*others, *blocks], "backward": [*others[:-1], *blocks[:-1]]}
    for phase, sizes in gathers.items():
        for size in sizes:
            yield Collective(kind="gather", size=layout.read * size, phase=phase, times=accumulation)
    for bucket in in_buckets(_last_to_first(counted.model), layout.key("reduce_bucket_size")):
        size = layout.sent * sum(tensor.numel() for tensor in bucket)
        yield Collective(kind="scatter", size=size, phase="backward", times=accumulation)
    for parameter in counted.model.parameters():
        if parameter.numel() <= small:
            yield Collective(kind="gather", size=layout.read * parameter.numel(), phase="update")
    yield Collective(kind="all-reduce", size=8, phase="update", times=2)  # DeepSpeed's own


def in_buckets(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Yield gradients grouped like DeepSpeed's buckets: in order, at most `limit` numbers, or one parameter."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.numel() > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket


def _last_to_first(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters in the order in which a backward pass makes their gradients."""
    return [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]


def _groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """The optimizer's."""
    named = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [group["params"] for group in decay_groups(named, 1.0)]


class _Owners:
    """Ownership of parameter parts: each group is one flat tensor, cut into equal parts."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], ranks: int) -> None:
        self.places: dict[int, tuple[int, int]] = {}  # a parameter's first number in its group, and a rank's share
        for group in groups:
            share = -(-sum(parameter.numel() for parameter in group) // ranks)
            start = 0
            for parameter in group:
                self.places[id(parameter)] = (start, share)
                start += parameter.numel()

    def of(self, parameter: nn.Parameter) -> Iterator[tuple[int, int]]:
        """(rank, numbers) of each part."""
        start, share = self.places[id(parameter)]
        stop = start + parameter.numel()
        while start < stop:
            end = min(stop, (start // share + 1) * share)
            yield start // share, end - start
            start = end


def memory(counted: Counted, layout: Layout, *, ranks: int, micro: int, accumulation: int) -> Memory:
    """Return the memory of one rank.

    Args:
        micro: rows of a micro-batch.
        accumulation: micro-batches of a step.
    """
    states = _states(counted, layout, ranks, accumulation)
    part = counted.over(layout.tensor, layout.split)
    activations = part.saved(layout.checkpointing, layout.rounded).step_bytes(micro)
    share = layout.sharers(ranks) if layout.engine == "fsdp" or layout.stage == 3 else 1
    network = 5 * MASTER * counted.network / share  # weights, gradient, two moments, and the first weights
    if layout.engine == "megatron":  # each rank has all of the network
        network = (3 + 2 / layout.sharing(ranks)) * MASTER * counted.network
        share = layout.sharing(ranks)
    # A hook's copy of the weights and its direction (benchmarks/mlo_memory.py), and the average of the weights.
    copies = 2 * bool(counted.network) + ("weight_average" in counted.config.hooks)
    return Memory(activations=activations, masks=network, hooks=copies * MASTER * part.parameters / share, **states)


def _states(counted: Counted, layout: Layout, ranks: int, accumulation: int) -> dict[str, float]:
    """Fields of Memory that do not depend on the rows."""
    every, several = counted.parameters, accumulation > 1
    block = max(counted.blocks, default=0)
    copy = layout.read * every if layout.rounded else 0
    if layout.engine == "plain" or (ranks == 1 and layout.stage is None):
        return {"weights": MASTER * every + copy, "gradients": MASTER * every, "moments": 2 * MASTER * every}
    if layout.engine == "megatron":
        return _megatron_states(counted.over(layout.tensor, layout.split).parameters, layout, ranks, several=several)
    if layout.engine == "ddp":
        # Flat buckets stay; gradients of earlier micro-batches lie beside them until they are packed.
        beside = MASTER * every if several else min(MASTER * every, BUCKET_BYTES)
        return {
            "weights": MASTER * every + copy,
            "gradients": beside,
            "moments": 2 * MASTER * every,
            "buckets": layout.sent * every,
        }
    if layout.engine == "fsdp":
        shard, whole = MASTER * every / layout.sharers(ranks), MASTER * (every if several else counted.rest)
        shards = {"weights": shard, "gradients": shard + whole, "moments": 2 * shard}
        if layout.offload:
            shards = {"weights": 0.0, "gradients": whole, "moments": 0.0, "host": 4 * shard}
        # Sums of two blocks are under way beside what is gathered; the rest's begin when that is gone.
        gathered = layout.read * (counted.rest + 2 * block)
        buckets = max(2 * layout.sent * block, layout.sent * counted.rest - gathered)
        return {**shards, "gathered": gathered, "buckets": buckets}
    return _zero_states(counted, layout, ranks)


def _megatron_states(parameters: int, layout: Layout, ranks: int, *, several: bool) -> dict[str, float]:
    """Return the state bytes of a Megatron rank that has `parameters` parameters, and moments of a share of their
    rows."""
    share, data = layout.sharing(ranks), layout.data_ranks(ranks)
    masters = MASTER * parameters / share if layout.rounded else 0
    beside = MASTER * parameters if several or data == 1 else min(MASTER * parameters, BUCKET_BYTES)
    flat = layout.sent * parameters if data > 1 else 0
    gathering = layout.read * min(parameters, BUCKET_BYTES // MASTER) if share > 1 else 0
    return {
        "weights": layout.read * parameters + masters,
        "gradients": beside,
        "moments": 2 * MASTER * parameters / share,
        "buckets": flat + (layout.sent * parameters / share if share > 1 else 0) + gathering,
    }


def _zero_states(counted: Counted, layout: Layout, ranks: int) -> dict[str, float]:
    """Return the state bytes of a DeepSpeed rank."""
    every, block = counted.parameters, max(counted.blocks, default=0)
    if layout.stage == 0:
        return {"weights": MASTER * every, "gradients": MASTER * every, "moments": 2 * MASTER * every}
    bucket = MASTER * layout.key("reduce_bucket_size")
    master_and_moments, where = 3 * MASTER * every / ranks, "host" if layout.offloads else "moments"
    if layout.stage in (1, 2):
        kept = layout.read * every if layout.stage == 1 else MASTER * every / ranks
        return {
            "weights": layout.read * every,
            "gradients": kept,
            where: master_and_moments,
            "buckets": 2 * bucket,
        } | ({} if where == "moments" else {"moments": 0.0})
    largest = max((parameter.numel() for parameter in counted.model.parameters()), default=0)
    held = 0 if ((layout.zero or {}).get("offload_param") or {}).get("device", "none") != "none" else layout.read
    return {
        "weights": held * every / ranks,
        "gradients": MASTER * every / ranks,
        where: master_and_moments,
        "gathered": layout.read * (counted.rest + 2 * block),
        "buckets": bucket + MASTER * largest,
    } | ({} if where == "moments" else {"moments": 0.0})
