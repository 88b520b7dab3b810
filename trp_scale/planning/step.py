"""How long one step takes on a cluster: arithmetic by a roofline, collectives by rates and latencies, what overlaps
with what, and the loader. Nothing of it is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trp_scale.config import Config
from trp_scale.models.counting import TRAINING_OVER_FORWARD
from trp_scale.planning.clusters import Cluster, Gpu
from trp_scale.planning.counting import SHARE_OF_MEMORY, Counted
from trp_scale.planning.layouts import Collective, Layout

ROWS_A_CORE = {"image": 700.0, "text": 3.2e6}
"""What a core of a loader makes in a second: crops of 224 px, or positions of text."""
LAUNCH_OF_A_COLLECTIVE = 20e-6
"""Seconds of the host."""
UPDATE_BYTES = 32
"""Of a parameter that is updated: weight, gradient and moments read, three of them written, the norm read again."""
HOST_LINK, HOST_UPDATE = 20e9, 1.0e9
"""With moments in host memory: bytes a second between GPU and host, and parameters that a rank's cores update."""

WAITING = 0.015
"""Of a step, for each doubling of the nodes: ranks wait for the slowest of them. Fitted to what llm-foundry publishes
of 125, 350 and 760 M parameters on 16 to 128 A100 (`benchmarks/plan_checks.py`)."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of a step.

    Attributes:
        compute: forward and backward passes, and the passes that methods add.
        update: the optimizer.
        exposed: collectives that nothing hides.
        waiting: for the slowest rank.
        communication: all collectives, hidden or not.
        host: of the host, which runs beside the device.
        loader: to make the rows of a step on all cores of the rank.
        cores: that a rank's loader needs to keep up.
        flops: model FLOPs a second and GPU, over its peak.
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
        """The longest of what runs side by side."""
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
    """One step of all ranks.

    Args:
        messages: of `traffic`.
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
    # What the ranks of a tensor group sum is needed at once.
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
    """Seconds of one of its collectives."""
    return cluster.seconds(message.kind, message.size, message.ranks, message.apart)


def _seconds(messages: list[Collective], cluster: Cluster, phase: str) -> float:
    return sum(message.times * collective_seconds(message, cluster) for message in messages if message.phase == phase)


def _tail(messages: list[Collective], cluster: Cluster) -> float:
    """The last collective of gradients, of each kind: it begins when the backward pass has ended."""
    last = {
        message.kind: message
        for message in messages
        if message.phase == "last" or (message.phase == "backward" and message.kind != "gather")
    }
    return sum(collective_seconds(message, cluster) for message in last.values())


def _update(counted: Counted, layout: Layout, cluster: Cluster, accumulation: int) -> float:
    """The optimizer's step over what a rank owns."""
    parameters = layout.updated(counted, cluster.gpus)
    if moved := layout.host_bytes(accumulation):
        return parameters * moved / HOST_LINK + parameters / HOST_UPDATE
    seconds = UPDATE_BYTES * parameters / (SHARE_OF_MEMORY * cluster.gpu.memory_rate)
    return seconds * (2 if counted.config.optimizer.kind == "lamb" else 1)


def prepass(config: Config, accumulation: int) -> int:
    """Forward passes that exact minimax adds to each micro-batch: none where a window is one micro-batch."""
    exact = getattr(config.balancer, "estimate", "") == "exact"
    return int(exact and accumulation > 1)


def extra_passes(counted: Counted, accumulation: int, ranks: int) -> float:
    """A step's arithmetic with learned masks over one without: 1 where none are learned."""
    if not counted.network:
        return 1.0
    return counted.step_flops(ranks) / (TRAINING_OVER_FORWARD * counted.outline.forward_flops)


def assumptions() -> list[str]:
    """Return the assumptions about a step, in words."""
    return [
        "an operation takes the longest of its bytes at 80 % of the memory's rate, its FLOPs at 70 % of the peak (35 % "
        "in attention) and 2.3 us; --training.compile auto fuses all that lies between two products, which is the best "
        "it could do; ZeRO-3 is not compiled",
        "gathers and reductions hide behind the pass that they belong to, but for the first gather of a forward pass "
        "and the last reduction; what comes after the update is not hidden, nor is what ranks that share matrices sum; "
        f"with --fsdp.offload nothing that passes between GPU and host at {HOST_LINK / 1e9:.0f} GB/s is",
        f"for each doubling of the nodes a step takes {WAITING:.1%} longer, since ranks wait for the slowest of them",
        f"a loader's core makes {ROWS_A_CORE['image']:.0f} crops of 224 px or {ROWS_A_CORE['text'] / 1e6:.1f} M "
        "positions of text a second; all cores of the node are the loaders'",
        "the passes of learned masks take the time of as many FLOPs of plain MAE; their collectives, and those of "
        "other hooks, are left out",
        f"the backward pass does {TRAINING_OVER_FORWARD - 1} times the forward's arithmetic in model FLOPs; "
        "checkpoints, validation, restarts and slow ranks are left out",
    ]
