"""Predict the time of a step on a cluster: arithmetic by a roofline, collectives by rates and latencies, their overlap,
and the loader. Nothing is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trp_scale.config import Config
from trp_scale.models.counting import TRAINING_OVER_FORWARD
from trp_scale.planning.clusters import Cluster, Gpu
from trp_scale.planning.counting import SHARE_OF_MEMORY, Counted
from trp_scale.planning.layouts import Collective, Layout

ROWS_A_CORE = {"image": 700.0, "text": 3.2e6}
"""Rows per second and loader core: crops of 224 px, or positions of text."""
LAUNCH_OF_A_COLLECTIVE = 20e-6
"""Seconds of the host."""
UPDATE_BYTES = 32
"""Bytes per updated parameter: weight, gradient and moments read, three of them written, the norm read again."""
HOST_LINK, HOST_UPDATE = 20e9, 1.0e9
"""With moments in host memory: bytes/s between GPU and host, and parameters/s that a rank's cores update."""

WAITING = 0.015
"""Share of a step, per doubling of the nodes, that ranks wait for the slowest. Fitted to llm-foundry's published
results for 125, 350 and 760 M parameters on 16 to 128 A100 (`benchmarks/plan_checks.py`)."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of a step.

    Attributes:
        compute: forward and backward passes, and passes of methods.
        update: the optimizer.
        exposed: collectives without overlap.
        waiting: for the slowest rank.
        communication: all collectives, overlapped or not.
        host: of the host, which runs in parallel to the device.
        loader: to make the rows of a step on all cores of the rank.
        cores: number of cores that a rank's loader needs.
        flops: model FLOP/s per GPU, divided by its peak.
    """

    compute: float
    update: float
    exposed: float
    waiting: float
    communication: float
    host: float
    loader: float
    cores: float
    flops: float

    @property
    def seconds(self) -> float:
        """Longest of the parallel parts."""
        return max(self.compute + self.update + self.exposed + self.waiting, self.host, self.loader)

    @property
    def bound(self) -> str:
        """Resource that limits the step."""
        seconds = {"loader": self.loader, "host": self.host, "communication": self.exposed, "GPU": self.compute}
        if self.seconds in (self.loader, self.host):
            return "loader" if self.seconds == self.loader else "host"
        return max(("communication", "GPU"), key=lambda name: seconds[name])


def peak_flops(config: Config, gpu: Gpu) -> float:
    """Return the peak FLOP/s of matrix products in the run's precision."""
    if config.training.precision != "fp32":
        return gpu.peak
    return gpu.tf32 if config.training.tf32 else gpu.fp32


def predict_step(
    counted: Counted, layout: Layout, cluster: Cluster, messages: list[Collective], *, micro: int, accumulation: int
) -> Step:
    """Predict one step of all ranks.

    Args:
        messages: from `traffic`.
        micro: rows of a micro-batch.
        accumulation: micro-batches of a step.
    """
    config, gpu, peak = counted.config, cluster.gpu, peak_flops(counted.config, cluster.gpu)
    fused = layout.compiles and config.training.compile in ("auto", "blocks", "whole")
    passes = layout.part(counted).passes(layout.checkpointing, layout.rounded, fused)
    forward, backward = (passes[name].seconds(micro, gpu, peak) for name in ("forward", "backward"))
    hidden, sums = ([message for message in messages if message.hides == hides] for hides in (True, False))
    hidden_seconds = {phase: _seconds(hidden, cluster, phase) for phase in ("forward", "backward", "last", "update")}
    gathers = [message for message in hidden if message.phase == "forward"]
    first = collective_seconds(gathers[0], cluster) if gathers else 0.0
    each_forward, each_backward = hidden_seconds["forward"] / accumulation, hidden_seconds["backward"] / accumulation
    exposed = accumulation * (max(0.0, each_forward - forward) + first)
    exposed += (accumulation - 1) * max(0.0, each_backward - backward)
    exposed += (
        max(0.0, each_backward + hidden_seconds["last"] - backward) + _tail(hidden, cluster) + hidden_seconds["update"]
    )
    # Tensor-parallel sums do not overlap.
    again = {"forward": 1 + prepass(config, accumulation)}
    summing = sum(
        again.get(message.phase, 1) * message.times * collective_seconds(message, cluster) for message in sums
    )
    exposed += summing
    times = extra_passes(counted, accumulation, cluster.gpus)
    compute = accumulation * (forward + backward) * times + accumulation * forward * prepass(config, accumulation)
    launching = sum(passes[name].launching() for name in passes) * times
    collectives = sum(message.times for message in messages) * LAUNCH_OF_A_COLLECTIVE
    rows = micro * accumulation
    positions = counted.outline.positions
    samples = rows * (positions if config.reads == "text" else getattr(getattr(config, "crops", None), "count", 1))
    model = counted.step_flops(cluster.gpus)
    update = _update(counted, layout, cluster, accumulation)
    step = Step(
        compute=compute,
        update=update,
        exposed=exposed,
        waiting=WAITING * math.log2(cluster.nodes) * (compute + update + exposed),
        communication=sum(hidden_seconds.values()) + summing,
        host=accumulation * launching + collectives + cluster.agreement(),
        loader=samples / ROWS_A_CORE[config.reads] / gpu.cores,
        cores=0.0,
        flops=0.0,
    )
    share = model / cluster.gpus / step.seconds / peak
    return Step(**{**vars(step), "flops": share, "cores": samples / ROWS_A_CORE[config.reads] / step.seconds})


def collective_seconds(message: Collective, cluster: Cluster) -> float:
    """Return the seconds of one of the identical collectives."""
    return cluster.seconds(message.kind, message.size, message.ranks, message.apart)


def _seconds(messages: list[Collective], cluster: Cluster, phase: str) -> float:
    return sum(message.times * collective_seconds(message, cluster) for message in messages if message.phase == phase)


def _tail(messages: list[Collective], cluster: Cluster) -> float:
    """Return the seconds of the last gradient collective of each kind: it starts after the backward pass."""
    last = {
        message.kind: message
        for message in messages
        if message.phase == "last" or (message.phase == "backward" and message.kind != "gather")
    }
    return sum(collective_seconds(message, cluster) for message in last.values())


def _update(counted: Counted, layout: Layout, cluster: Cluster, accumulation: int) -> float:
    """Return the seconds of the optimizer step over a rank's parameters."""
    parameters = layout.updated(counted, cluster.gpus)
    if moved := layout.host_bytes(accumulation):
        return parameters * moved / HOST_LINK + parameters / HOST_UPDATE
    seconds = UPDATE_BYTES * parameters / (SHARE_OF_MEMORY * cluster.gpu.memory_rate)
    return seconds * (2 if counted.config.optimizer.kind == "lamb" else 1)


def prepass(config: Config, accumulation: int) -> int:
    """Return the forward passes that exact minimax adds to each micro-batch: none for a single micro-batch."""
    exact = getattr(config.balancer, "estimate", "") == "exact"
    return int(exact and accumulation > 1)


def extra_passes(counted: Counted, accumulation: int, ranks: int) -> float:
    """Return the arithmetic of a step with learned masks relative to one without; 1 without learned masks."""
    if not counted.network:
        return 1.0
    return counted.step_flops(ranks) / (TRAINING_OVER_FORWARD * counted.outline.forward_flops)


def assumptions() -> list[str]:
    """Return descriptions of the assumptions about a step."""
    return [
        "an operation takes the maximum of its bytes at 80 % of the memory's rate, its FLOPs at 70 % of the peak (35 % "
        "in attention) and 2.3 us; --training.compile auto fuses everything between two products (best case); ZeRO-3 "
        "is not compiled",
        "gathers and reductions overlap with their pass, except the first gather of a forward pass and the last "
        "reduction; collectives after the update and tensor-parallel sums do not overlap; with --fsdp.offload, copies "
        f"between GPU and host at {HOST_LINK / 1e9:.0f} GB/s do not overlap",
        f"per doubling of the nodes a step takes {WAITING:.1%} longer, since ranks wait for the slowest",
        f"a loader core makes {ROWS_A_CORE['image']:.0f} crops of 224 px or {ROWS_A_CORE['text'] / 1e6:.1f} M "
        "positions of text a second; the loaders use all cores of the node",
        "passes of learned masks take the time of plain MAE passes with equal FLOPs; collectives of learned masks and "
        "other hooks are ignored",
        f"the backward pass does {TRAINING_OVER_FORWARD - 1} times the forward's arithmetic in model FLOPs; "
        "checkpoints, validation, restarts and slow ranks are ignored",
    ]
