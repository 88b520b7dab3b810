"""`trp-scale plan` and `trp-scale pretrain --dry_run`: predict the layout of a run on a cluster, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from trp_scale.config import RefusedError
from trp_scale.config.run_flags import Arguments
from trp_scale.console import GIB, Shown, Table
from trp_scale.data.mixture import parse_paths
from trp_scale.engines import ds_config
from trp_scale.models.counting import TRAINING_OVER_FORWARD
from trp_scale.planning.clusters import (
    CALL,
    GPUS,
    HOP,
    HOST_HOP,
    NETWORK_HOP,
    NO_DATA,
    SHARE_OF_LINKS,
    Cluster,
    Gpu,
    PlanArguments,
    find_gpu,
)
from trp_scale.planning.counting import Counted
from trp_scale.planning.layouts import LayoutChoice
from trp_scale.planning.plan import HOST_LINK, ROWS_A_CORE, WAITING, ClusterPlan, fitting, make_plans, refusal
from trp_scale.pretraining.base import DataFacts, find_upstream, set_length

if TYPE_CHECKING:
    from rich.console import RenderableType


RANKING = ("layout", "micro x acc.", "GiB", "step ms", "rows/s", "peak", "GB sent", "sends", "bound by")


def ranking(plans: Sequence[ClusterPlan]) -> Table:
    """Return a table with a row for each plan that fits."""
    rows = []
    for plan in plans:
        assert plan.step is not None, "of a plan that fits"
        layout, *figures = _cells(plan)
        sent = [f"{plan.bytes_sent() / 1e9:.2f}", f"{plan.collectives:,}"]
        step = f"{plan.seconds * 1e3:,.0f}"
        rows.append([layout, *figures[:2], step, *figures[2:], *sent, plan.step.bound])
    return Table(
        head=RANKING, rows=rows, notes=["GiB: of a GPU; peak: share of its FLOP/s; sends: collectives of a step"]
    )


def _cells(plan: ClusterPlan) -> list[str]:
    """Return the columns that the ranking and the curve share."""
    assert plan.step is not None, "of a plan that fits"
    return [
        plan.layout.name,
        f"{plan.micro} x {plan.accumulation}",
        f"{plan.memory.device / GIB:.1f}",
        f"{plan.rows_a_second:,.0f}",
        f"{plan.step.flops:.0%}",
    ]


def memory_table(plans: Sequence[ClusterPlan]) -> Table:
    """Return a table of GiB by purpose, a row for each plan."""
    columns: dict[str, list[str]] = {}
    for plan in plans:
        size = vars(plan.memory)
        rest = sum(size.pop(name) for name in ("gathered", "buckets", "workspace"))
        for name, value in {**size, "rest": rest}.items():
            columns.setdefault(name, []).append(f"{value / GIB:.2f}")
    columns = {name: column for name, column in columns.items() if any(cell != "0.00" for cell in column)}
    columns["lacks"] = ["-" if plan.fits else f"{plan.short / GIB:.1f}" for plan in plans]
    rows = [[plan.layout.name, *row] for plan, row in zip(plans, zip(*columns.values(), strict=True), strict=True)]
    return Table(
        head=["GiB a GPU", *columns], rows=rows, notes=["rest: gathered weights, buckets of collectives, workspace"]
    )


def time_lines(plan: ClusterPlan) -> list[str]:
    """Return lines on the duration of a run and of the parts of a step."""
    step, cores = plan.step, plan.cluster.gpu.cores
    assert step is not None, "of a plan that fits"
    parts = {
        "arithmetic": step.compute,
        "update": step.update,
        "collectives not hidden": step.exposed,
        "waiting for the slowest": step.waiting,
        "all collectives": step.communication,
        "host": step.host,
        "loader": step.loader,
    }
    listed = ", ".join(f"{name} {seconds * 1e3:,.1f}" for name, seconds in parts.items())
    return [
        f"{plan.steps:,} steps take {plan.days:,.2f} days, {plan.gpu_hours:,.0f} GPU-hours",
        f"milliseconds of a step: {listed}",
        f"the loader needs {step.loader * cores / step.seconds:.1f} cores a GPU of {cores}",
    ]


CURVE = ("GPUs", "layout", "micro x acc.", "GiB", "rows/s", "peak", "efficiency", "days")


def curve(plan_of_world: Mapping[int, ClusterPlan | RefusedError]) -> Table:
    """Return a table of the best plan on each number of GPUs, with refusals as notes. Efficiency: rows/s per GPU
    relative to the first that fits."""
    plans = [plan for plan in plan_of_world.values() if isinstance(plan, ClusterPlan)]
    rows, notes = [], []
    for gpus, plan in plan_of_world.items():
        if isinstance(plan, RefusedError):
            notes.append(f"{gpus} GPUs: {str(plan).partition(':')[0]}")
            continue
        rate, first = (item.rows_a_second / item.cluster.gpus for item in (plan, plans[0]))
        rows.append([str(gpus), *_cells(plan), f"{rate / first:.0%}", f"{plan.days:,.2f}"])
    return Table(head=CURVE, rows=rows, words=2, notes=notes)


def describe_plan(counted: Counted, cluster: Cluster) -> Iterator[str]:
    """Describe the plan in three lines."""
    config, outline = counted.config, counted.outline
    network = f", and {counted.network / 1e6:,.1f} M of the masking network" if counted.network else ""
    yield (
        f"{counted.parameters / 1e6:,.1f} M parameters in {len(counted.blocks)} blocks and "
        f"{counted.rest / 1e6:,.1f} M outside{network}"
    )
    yield (
        f"{config.batch.global_size:,} rows of {outline.positions:,} positions a step, "
        f"{counted.step_flops(cluster.gpus) / 1e15:,.3f} PFLOP, {config.training.steps:,} steps, "
        f"{config.training.precision}"
    )
    yield f"{cluster.gpus} x {cluster.gpu.name} in {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"


def assumption_lines(gpu: Gpu) -> list[str]:
    """Return the assumptions of a plan."""
    return [
        f"predicted, not measured; {gpu.name}: {gpu.peak / 1e12:.0f} TFLOP/s in bf16, {gpu.memory / GIB:.0f} GiB at "
        f"{gpu.memory_rate / 1e12:.2f} TB/s, {gpu.link / 1e9:.0f} GB/s within a node, {gpu.network / 1e9:.3g} GB/s "
        f"between nodes, {gpu.cores} cores ({gpu.source})",
        f"a large collective reaches {SHARE_OF_LINKS:.0%} of the slowest link; nodes of 8 GPUs share all adapters",
        f"a collective takes {CALL * 1e6:.0f} us plus, per GPU of its ring, {HOP * 1e6:.0f} us within a node and "
        f"{NETWORK_HOP * 1e6:.0f} us between nodes",
        f"the hosts' all-reduce is a ring over TCP, {HOST_HOP * 1e6:.0f} us a hop, while the GPUs still have work",
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


@dataclass(frozen=True, kw_only=True, repr=False)
class RunPlan(Shown):
    """Layouts of a run on a cluster.

    Attributes:
        plans: layouts that fit, the fastest first, then the others; `command(recipe)` starts one.
        curve: fastest plan, or refusal, for each number of GPUs of --predict.
        recipe: name or path.
        listed: number of layouts to list with their commands; 0 = only the layout that the settings state.
        assumed: assumptions.
    """

    counted: Counted
    cluster: Cluster
    plans: Sequence[ClusterPlan]
    recipe: str = ""
    listed: int = 0
    curve: Mapping[int, ClusterPlan | RefusedError] = field(default_factory=dict)
    assumed: Sequence[str] = ()

    @property
    def best(self) -> ClusterPlan:
        """Fastest layout."""
        return self.plans[0]

    def parts(self) -> Iterator[RenderableType]:
        """Yield the layouts with memory, time and commands, the curve, and the assumptions."""
        from rich.text import Text

        yield from map(Text, describe_plan(self.counted, self.cluster))
        best = fitting(self.plans)[: self.listed or None]
        yield from ranking(best).parts()
        yield from memory_table(self.plans).parts()
        if self.listed:
            yield f"best: {self.best.layout.name}"
        yield from map(Text, time_lines(self.best))
        if self.listed:
            yield ""
            yield from (f"{number}. {plan.command(self.recipe)}" for number, plan in enumerate(best, 1))
        if self.curve:
            yield from curve(self.curve).parts()
        yield "\nassumed:"
        yield from (Text(f"- {line}") for line in self.assumed)


def plan(arguments: PlanArguments) -> RunPlan:
    """Run `trp-scale plan`. Raises RefusedError: nothing fits; names the nearest plan that does."""
    facts, whence = read_data_facts(arguments)
    counted = Counted(arguments.config, facts)
    choices = fixed_layout(arguments)
    cluster = Cluster(gpu=find_gpu(arguments.gpu), gpus=arguments.gpus)
    return replace(
        find_plans(counted, cluster, choices, listed=arguments.best),
        recipe=arguments.recipe,
        curve=best_on(counted, cluster.gpu, arguments.worlds(), choices),
        assumed=[whence, *assumption_lines(cluster.gpu)],
    )


def read_data_facts(arguments: PlanArguments) -> tuple[DataFacts, str]:
    """Return the shapes of the data and their origin: the data set if it exists, otherwise the flags."""
    path = arguments.config.data.path
    if path != NO_DATA and all((member.path / "dataset.json").is_file() for member in parse_paths(path)):
        set_length(arguments.config)
        return find_upstream(arguments.config).facts(arguments.config), f"shapes from {path}"
    if (flag := arguments.config.length_flag) != "--training.steps":
        raise RefusedError(
            f"{flag} needs the number of training rows, and --data.path {path} is no data set; allowed: a data set, or "
            "--training.steps"
        )
    facts = DataFacts(
        length=arguments.length, vocabulary=arguments.vocabulary, classes={"semseg": arguments.semseg_classes}
    )
    flags = "--length and --vocabulary" if arguments.config.reads == "text" else "--semseg_classes"
    return facts, f"no data set to read: shapes from {flags}"


def fixed_layout(arguments: Arguments) -> LayoutChoice:
    """Return the part of the layout that the command line fixes."""
    if arguments.ds_config is None:
        return LayoutChoice(engine=arguments.engine)
    return LayoutChoice(engine="deepspeed", document=ds_config.read(arguments.ds_config), path=str(arguments.ds_config))


def find_plans(counted: Counted, cluster: Cluster, choices: LayoutChoice, *, listed: int = 0) -> RunPlan:
    """Return all layouts; with `listed` 0 only the one that the settings state. Raises RefusedError: nothing fits;
    names the nearest plan that does."""
    plans = [plan for plan in make_plans(counted, cluster, choices) if listed or plan.layout.is_stated(counted.config)]
    if not fitting(plans):
        raise refusal(counted, plans, choices)
    return RunPlan(counted=counted, cluster=cluster, plans=plans, listed=listed)


def best_on(
    counted: Counted, gpu: Gpu, worlds: Sequence[int], choices: LayoutChoice | None = None
) -> dict[int, ClusterPlan | RefusedError]:
    """Return the fastest plan, or the refusal, for each number of GPUs."""
    plan_of_world: dict[int, ClusterPlan | RefusedError] = {}
    for gpus in worlds:
        try:
            plans = make_plans(counted, Cluster(gpu=gpu, gpus=gpus), choices)
        except RefusedError as error:
            plan_of_world[gpus] = error
            continue
        plans_that_fit = fitting(plans)
        plan_of_world[gpus] = plans_that_fit[0] if plans_that_fit else RefusedError("no layout fits")
    return plan_of_world


def dry_run(arguments: Arguments, world: int) -> RunPlan:
    """Return the plan of a `trp-scale pretrain` command on its ranks, with the shapes of its data. Raises RefusedError:
    it does not fit."""
    gpu, assumed = this_gpu()
    config = arguments.config
    set_length(config)
    counted = Counted(config, find_upstream(config).facts(config))
    choices = replace(fixed_layout(arguments), engine=arguments.choose_engine(world))
    plan = find_plans(counted, Cluster(gpu=gpu, gpus=world), choices)
    return replace(plan, assumed=[*assumed, *assumption_lines(gpu)])


def this_gpu() -> tuple[Gpu, list[str]]:
    """Return this machine's GPU or an assumed one, and the assumption."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0).lower().replace(" ", "")
        large = torch.cuda.get_device_properties(0).total_memory > 50 * 2**30
        for known in GPUS.values():
            kind, _, size = known.name.partition("-")
            if kind in name and (not size or (size == "80") == large):
                return known, []
        return GPUS["a100-80"], [f"this machine's {name} is unknown; assumed: a100-80"]
    return GPUS["a100-80"], ["this machine has no GPU; assumed: a100-80 (select another by trp-scale plan --gpu)"]
