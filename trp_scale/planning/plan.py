"""Plans: the largest micro-batch and the step time of each engine, stage and activation checkpointing, the best first.
If nothing fits, the refusal names the nearest plan that does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trp_scale.config import Config, RefusedError
from trp_scale.config.checks import engine_rules
from trp_scale.config.registry import import_name, names
from trp_scale.data.train_source import check_partition
from trp_scale.planning.clusters import GPUS, Cluster
from trp_scale.planning.counting import Counted
from trp_scale.planning.layouts import Collective, Layout, LayoutChoice, Memory, memory, traffic
from trp_scale.planning.step import Step, predict_step
from trp_scale.training.micro_size import SURE, candidates

ENOUGH_POSITIONS = 4096
"""Positions of a micro-batch that keep a GPU busy; above this, activation checkpointing cannot be faster."""
STATED = 0.95
"""Maximum share of a GPU's memory for an explicit micro-batch size; an automatic one uses SURE, like a run."""
MOST_GPUS = 4096
"""Maximum size of the nearest cluster that fits."""
SECONDS_A_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Layout on a cluster.

    Attributes:
        micro: rows of a micro-batch.
        accumulation: micro-batches of a step.
        limit: maximum bytes of a GPU's memory.
        messages: collectives of a step.
    """

    layout: Layout
    cluster: Cluster
    micro: int
    accumulation: int
    memory: Memory
    limit: float
    messages: list[Collective]
    step: Step | None
    steps: int

    @property
    def fits(self) -> bool:
        return self.short <= 0

    @property
    def short(self) -> float:
        """Missing bytes on the GPU or its host."""
        host = self.memory.host - self.cluster.gpu.host_memory
        return max(self.memory.device - self.limit, host)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        assert self.step is not None, "of a plan that fits"
        return self.step.seconds

    @property
    def days(self) -> float:
        return self.steps * self.seconds / SECONDS_A_DAY

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.cluster.gpus

    @property
    def rows_a_second(self) -> float:
        return self.micro * self.accumulation * self.layout.data_ranks(self.cluster.gpus) / self.seconds

    @property
    def collectives(self) -> int:
        """Collectives of a step, including small ones."""
        return sum(message.times for message in self.messages)

    def bytes_sent(self) -> float:
        """Return the bytes that a rank sends per step (ring collectives)."""
        sent = 0.0
        for message in self.messages:
            ranks = message.ranks or self.cluster.gpus
            trips = 2 if message.kind == "all-reduce" else 1
            sent += trips * message.times * message.size * (ranks - 1) / ranks
        return sent

    def command(self, recipe: str) -> str:
        """Return the command line of this plan; DeepSpeed's starts all nodes, others run on each node."""
        flags = f"--recipe {recipe} --batch.micro_size {self.micro}"
        if self.layout.checkpointing != "none":
            flags += f" --training.activation_checkpointing {self.layout.checkpointing}"
        flags += f"{self.layout.flags} --data.path DATA"
        return self.layout.command(flags, self.cluster.gpus, self.cluster.gpu.per_node)


def layouts(counted: Counted, cluster: Cluster, choices: LayoutChoice) -> Iterator[Layout]:
    """Yield the layouts that the settings allow, of the named engine or of all that are tried. Raises RefusedError:
    refused settings, or settings of unknown cost."""
    for name in [choices.engine] if choices.engine else names("engine"):
        location = engine_rules(name).layouts
        if not location and choices.engine:
            raise RefusedError(f"--engine {name}: its layouts and cost are unknown; allowed in a plan: another engine")
        if location and (choices.engine or import_name(location).is_tried(cluster.gpus)):
            kind: type[Layout] = import_name(location)
            yield from kind.candidates(name, counted, cluster, choices)


def make_plans(counted: Counted, cluster: Cluster, choices: LayoutChoice | None = None) -> list[ClusterPlan]:
    """Return a plan for each layout: plans that fit, by speed; then the others, by missing memory. Raises RefusedError:
    no layout divides the global batch, or the settings are refused."""
    plans: list[ClusterPlan] = []
    enough: set[str] = set()  # layouts that more checkpointing cannot make faster
    refused: RefusedError | None = None
    for layout in layouts(counted, cluster, choices or LayoutChoice()):
        if layout.label in enough:
            continue
        try:
            plan = best(counted, layout, cluster, _sizes(counted.config, layout.data_ranks(cluster.gpus)))
        except RefusedError as error:
            refused = error
            continue
        busy = plan.micro * counted.outline.positions >= ENOUGH_POSITIONS or plan.accumulation == 1
        if plan.fits and busy:
            enough.add(layout.label)
        plans.append(plan)
    if refused and not plans:
        raise refused
    return sorted(plans, key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.short))


def _sizes(config: Config, gpus: int) -> list[int]:
    if config.batch.micro_size == "auto":
        return candidates(config, gpus)
    check_partition(config.batch.global_size, config.batch.micro_rows, gpus)
    return [config.batch.micro_rows]


def best(counted: Counted, layout: Layout, cluster: Cluster, sizes: Sequence[int]) -> ClusterPlan:
    """Return the plan with the largest micro-batch that fits, or the smallest if none fits."""
    config, gpus = counted.config, cluster.gpus
    limit = (SURE if config.batch.micro_size == "auto" else STATED) * cluster.gpu.memory
    for micro in reversed(sizes):
        accumulation = config.batch.global_size // (layout.data_ranks(gpus) * micro)
        memory_needed = memory(counted, layout, ranks=gpus, micro=micro, accumulation=accumulation)
        if memory_needed.device <= limit:
            break
    plan = ClusterPlan(
        layout=layout,
        cluster=cluster,
        micro=micro,
        accumulation=accumulation,
        memory=memory_needed,
        limit=limit,
        messages=[],
        step=None,
        steps=config.training.steps,
    )
    if not plan.fits:
        return plan
    messages = traffic(counted, layout, ranks=gpus, micro=micro, accumulation=accumulation)
    step = predict_step(counted, layout, cluster, messages, micro=micro, accumulation=accumulation)
    return replace(plan, messages=messages, step=step)


def fitting(plans: Sequence[ClusterPlan]) -> list[ClusterPlan]:
    """Return the plans that fit, fastest first."""
    return [plan for plan in plans if plan.fits]


def nearest_that_fits(counted: Counted, cluster: Cluster, choices: LayoutChoice | None = None) -> ClusterPlan | None:
    """Return the plan on the smallest cluster that fits, preferring larger GPUs to more GPUs; `None` if none fits."""
    larger = [gpu for gpu in GPUS.values() if gpu.memory > cluster.gpu.memory]
    gpus = cluster.gpus
    while gpus <= MOST_GPUS:
        kinds = [cluster.gpu, *larger] if gpus > cluster.gpus else larger
        for gpu in kinds:
            try:
                plans_that_fit = fitting(make_plans(counted, Cluster(gpu=gpu, gpus=gpus), choices))
            except RefusedError:
                continue  # the batch is not divisible
            if plans_that_fit:
                return plans_that_fit[0]
        gpus *= 2
    return None


def refusal(counted: Counted, plans: Sequence[ClusterPlan], choices: LayoutChoice | None = None) -> RefusedError:
    """Return an error that names the missing memory and the nearest plan that fits."""
    least = min(plans, key=lambda plan: plan.short)
    cluster, other = least.cluster, nearest_that_fits(counted, least.cluster, choices)
    words = (
        f"no layout fits on {cluster.gpus} x {cluster.gpu.name}: {least.layout.name} with micro-batches of "
        f"{least.micro} is the closest and takes {least.memory.device / 2**30:.1f} GiB of "
        f"{least.limit / 2**30:.1f} GiB"
    )
    if least.memory.host > cluster.gpu.host_memory:
        words += f", and {least.memory.host / 2**30:.1f} GiB of its host's memory"
    if other is None:
        return RefusedError(f"{words}; none of up to {MOST_GPUS} GPUs fits; allowed: a smaller model or micro-batch")
    return RefusedError(
        f"{words}; the nearest that fits: --gpus {other.cluster.gpus} --gpu {other.cluster.gpu.name}, "
        f"{other.layout.name}, micro-batches of {other.micro}, "
        f"{other.memory.device / 2**30:.1f} GiB"
    )
