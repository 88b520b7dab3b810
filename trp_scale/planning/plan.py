"""Plans: for each engine, stage and way of checkpointing the micro-batch that fits, the time of a step, and the best of
them first. What does not fit is refused with the nearest that does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trp_scale.config import Config, RefusedError
from trp_scale.config.checks import check_engine
from trp_scale.config.json_files import read_object
from trp_scale.data.train_source import check_partition
from trp_scale.engines import ds_config
from trp_scale.planning.clusters import GPUS, Cluster
from trp_scale.planning.counting import Checkpointing, Counted
from trp_scale.planning.layouts import MASTER, Collective, Layout, Memory, memory, traffic
from trp_scale.planning.step import Step, predict_step
from trp_scale.planning.tensor_parallel import declared_plan, degrees
from trp_scale.training.micro_size import SURE, candidates

SHIPPED = Path(__file__).parents[1] / "launch_files" / "ds_configs"
SHIPPED_FILES = ("zero1.json", "zero2.json", "zero3.json", "zero3_offload.json")
"""DeepSpeed's files that are tried where none is given."""

ENOUGH_POSITIONS = 4096
"""Of a micro-batch that keeps a GPU busy: above it checkpointing activations cannot gain."""
STATED = 0.95
"""Share of a GPU's memory that a stated micro-batch may take; one that is chosen takes SURE, as a run would."""
MOST_GPUS = 4096
"""Looked at for the nearest cluster that fits."""
SECONDS_A_DAY = 86400


BYTES_OF = {"fp32": 4, "bf16": 2}
"""Of a number, by the name of its type."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A layout on a cluster. Attributes: micro: rows of a micro-batch; accumulation: of them in a step; limit: bytes of
    a GPU's memory that it may take; messages: collectives of a step."""

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
        """Bytes that are missing, on the GPU or on its host."""
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
        """Collectives of a step, small ones included."""
        return sum(message.times for message in self.messages)

    def bytes_sent(self) -> float:
        """Bytes that a rank sends per step (ring collectives)."""
        sent = 0.0
        for message in self.messages:
            ranks = message.ranks or self.cluster.gpus
            trips = 2 if message.kind == "all-reduce" else 1
            sent += trips * message.times * message.size * (ranks - 1) / ranks
        return sent

    def command(self, recipe: str) -> str:
        """The command line of this plan, on each node but for DeepSpeed's, which starts the others."""
        gpus, per_node = self.cluster.gpus, min(self.cluster.gpus, self.cluster.gpu.per_node)
        flags = f"--recipe {recipe} --batch.micro_size {self.micro}"
        if self.layout.checkpointing != "none":
            flags += f" --training.activation_checkpointing {self.layout.checkpointing}"
        if self.layout.shard_ranks:
            flags += f" --fsdp.shard_ranks {self.layout.shard_ranks}"
        if self.layout.offload:
            flags += " --fsdp.offload True"
        if self.layout.tensor > 1:
            flags += f" --megatron.tensor_parallel {self.layout.tensor}"
        if self.layout.split:
            flags += " --megatron.sequence_parallel True"
        flags += " --data.path DATA"
        if self.layout.engine == "plain":
            return f"trp-scale pretrain {flags}"
        if self.layout.engine == "deepspeed":
            hosts = "" if gpus <= per_node else "--hostfile HOSTFILE "
            return f"deepspeed {hosts}launch/pretrain.py --ds_config {self.layout.ds_config} {flags}"
        nodes = (
            "" if gpus <= per_node else f"--nnodes {self.cluster.nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29500 "
        )
        return f"torchrun {nodes}--nproc_per_node {per_node} launch/pretrain.py --engine {self.layout.engine} {flags}"


@dataclass(frozen=True, kw_only=True)
class Given:
    """Part of the layout that the command line fixes. Attributes: engine: None: all are tried; document: DeepSpeed's
    file as read, with its path; None: those shipped are tried."""

    engine: str | None = None
    document: Mapping[str, Any] | None = None
    path: str = ""


def layouts(config: Config, gpus: int, choices: Given, per_node: int = 8) -> Iterator[Layout]:
    """Yield the layouts that these settings allow on `gpus` GPUs. FSDP2 is tried with one copy and with one on each
    node.

    Raises:
        RefusedError: DeepSpeed's file contradicts the recipe, or settings whose cost is not known here.
    """
    if config.fsdp.offload_directory:
        raise RefusedError(
            f"--fsdp.offload_directory {config.fsdp.offload_directory}: the speed of its disk is not known here; "
            "allowed in a plan: --fsdp.offload without it"
        )
    stated = config.training.activation_checkpointing
    ways: tuple[Checkpointing, ...] = (stated,) if stated != "none" else ("none", "full")
    read, sent = BYTES_OF[config.training.weights], BYTES_OF[config.training.gradients]
    engines = ("plain",) if gpus == 1 else ("ddp", "fsdp")
    for engine in engines if choices.engine is None and choices.document is None else (choices.engine,):
        if engine is not None and engine != "deepspeed":
            for shard_ranks in _groups(config, gpus, per_node) if engine == "fsdp" else (0,):
                offload = engine == "fsdp" and config.fsdp.offload
                for way in ways:
                    yield Layout(
                        engine=engine,
                        checkpointing=way,
                        read=read,
                        sent=sent,
                        shard_ranks=shard_ranks,
                        offload=offload,
                    )
    for path, document in _documents(config, gpus, choices):
        resolved = _resolve(config, document, path, gpus)
        half = any(resolved.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        of_name = {"bf16": 2, "bfp16": 2, "fp16": 2, "fp32": 4}
        travels = of_name.get(str(resolved.get("communication_data_type")), 2 if half else 4)
        for way in ways:
            yield Layout(
                engine="deepspeed",
                stage=ds_config.zero_stage(resolved),
                checkpointing=way,
                read=2 if half else 4,
                sent=travels,
                ds_config=path,
                zero=resolved["zero_optimization"],
            )


def _groups(config: Config, gpus: int, per_node: int) -> tuple[int, ...]:
    """Ranks that may share one copy of the weights; 0: all."""
    stated = config.fsdp.shard_ranks
    if stated:
        if gpus % stated:
            raise RefusedError(f"--fsdp.shard_ranks is {stated}, allowed: a divisor of the {gpus} ranks, or 0 for all")
        return (stated if stated < gpus else 0,)
    return (0, per_node) if gpus > per_node and gpus % per_node == 0 else (0,)


def _documents(config: Config, gpus: int, choices: Given) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if choices.document is not None:
        yield choices.path, choices.document
    elif choices.engine in (None, "deepspeed") and gpus > 1 and config.training.weights == "fp32":
        for name in SHIPPED_FILES:
            if config.optimizer.kind == "lamb" and "offload" in name:
                continue  # the engine refuses it
            yield f"ds_configs/{name}", read_object(SHIPPED / name)


def _resolve(config: Config, document: Mapping[str, Any], path: str, gpus: int) -> dict[str, Any]:
    """DeepSpeed's file with its values filled in; how a layout lies does not depend on the micro-batch."""
    sized = replace(config, batch=replace(config.batch, micro_size=1))
    accumulation = check_partition(config.batch.global_size, 1, gpus)
    document = {key: value for key, value in document.items() if key not in OF_THE_BATCH}
    return ds_config.resolve(document, sized, world=gpus, accumulation=accumulation, path=path)


OF_THE_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that the run itself compares with the micro-batch that it takes."""


def make_plans(counted: Counted, cluster: Cluster, choices: Given | None = None) -> list[ClusterPlan]:
    """A plan of each layout: those that fit first, the fastest of them first; then those that do not, from the one that
    lacks least.

    Raises:
        RefusedError: the global batch does not divide over the GPUs, or no micro-batch goes with the settings.
    """
    choices = choices or Given()
    if choices.engine == "megatron":
        return in_order(_plans_of_megatron(counted, cluster))
    sizes = _sizes(counted.config, cluster.gpus)
    plans: list[ClusterPlan] = []
    enough: set[tuple[str, int | None, str, int]] = set()
    for layout in layouts(counted.config, cluster.gpus, choices, cluster.gpu.per_node):
        same = (layout.engine, layout.stage, layout.ds_config, layout.shard_ranks)
        if same in enough:
            continue
        plan = best(counted, layout, cluster, sizes)
        busy = plan.micro * counted.outline.positions >= ENOUGH_POSITIONS or plan.accumulation == 1
        if plan.fits and busy:
            enough.add(same)
        plans.append(plan)
    return in_order(plans)


def in_order(plans: Sequence[ClusterPlan]) -> list[ClusterPlan]:
    """Sort plans: those that fit by speed, then the others by missing memory."""
    return sorted(plans, key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.short))


def _plans_of_megatron(counted: Counted, cluster: Cluster) -> list[ClusterPlan]:
    """Return plans for the configured tensor-parallel size, or for each allowed size if it is 1.

    Raises:
        RefusedError: none is allowed, the batch divides over none, or settings that the engine does not have or whose
            cost is not known here.
    """
    config, stated = counted.config, counted.config.megatron.tensor_parallel
    check_engine(replace(config, batch=replace(config.batch, micro_size=1)), "megatron", gpu=True)
    allowed = list(degrees(declared_plan(counted.model), cluster.gpus, cluster.gpu.per_node))
    if stated > 1 and stated not in allowed:
        raise RefusedError(
            f"--megatron.tensor_parallel is {stated}; allowed for this model on {cluster.gpus} GPUs in nodes of "
            f"{cluster.gpu.per_node}: {', '.join(map(str, allowed))}"
        )
    fitting_plans, refused = [], []
    for ranks in [stated] if stated > 1 else allowed:
        layout = megatron_layout(config, ranks)
        try:
            fitting_plans.append(best(counted, layout, cluster, _sizes(config, layout.data_ranks(cluster.gpus))))
        except RefusedError as error:
            refused.append(error)
    if not fitting_plans:
        raise refused[-1]
    return fitting_plans


def megatron_layout(config: Config, tensor: int) -> Layout:
    """Return the Megatron layout of these settings with `tensor` ranks that share matrices."""
    return Layout(
        engine="megatron",
        read=BYTES_OF[config.training.weights],
        sent=BYTES_OF[config.training.gradients],
        tensor=tensor,
        shard_moments=config.megatron.shard_moments,
        split=config.megatron.sequence_parallel,
    )


def _sizes(config: Config, gpus: int) -> list[int]:
    if config.batch.micro_size == "auto":
        return candidates(config, gpus)
    check_partition(config.batch.global_size, config.batch.micro_rows, gpus)
    return [config.batch.micro_rows]


def best(counted: Counted, layout: Layout, cluster: Cluster, sizes: Sequence[int]) -> ClusterPlan:
    """The largest micro-batch that fits, or the smallest where none does."""
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


def nearest_that_fits(counted: Counted, cluster: Cluster, choices: Given | None = None) -> ClusterPlan | None:
    """The smallest cluster that some layout fits on: other GPUs before more of them; None: none of those tried."""
    larger = [gpu for gpu in GPUS.values() if gpu.memory > cluster.gpu.memory]
    gpus = cluster.gpus
    while gpus <= MOST_GPUS:
        kinds = [cluster.gpu, *larger] if gpus > cluster.gpus else larger
        for gpu in kinds:
            try:
                plans_that_fit = fitting(make_plans(counted, Cluster(gpu=gpu, gpus=gpus), choices))
            except RefusedError:
                continue  # the batch does not divide over so many
            if plans_that_fit:
                return plans_that_fit[0]
        gpus *= 2
    return None


def refusal(counted: Counted, plans: Sequence[ClusterPlan], choices: Given | None = None) -> RefusedError:
    """Return an error that names the missing memory and the nearest plan that fits."""
    least = min(plans, key=lambda plan: plan.short)
    cluster, other = least.cluster, nearest_that_fits(counted, least.cluster, choices)
    words = (
        f"no layout fits on {cluster.gpus} x {cluster.gpu.name}: {least.layout.name} with micro-batches of "
        f"{least.micro} lacks least and takes {least.memory.device / 2**30:.1f} GiB of "
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


__all__ = ["MASTER", "ClusterPlan", "Given", "best", "fitting", "layouts", "make_plans", "nearest_that_fits", "refusal"]
