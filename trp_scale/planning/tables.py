"""Tables of plans in Markdown, which is also readable on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from trp_scale.config import RefusedError
from trp_scale.console import GIB, Table
from trp_scale.planning import clusters, step
from trp_scale.planning.counting import Counted
from trp_scale.planning.plan import ClusterPlan


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with aligned columns."""
    return Table(head=head, rows=rows, words=len(head)).to_markdown(padded=True).splitlines()


RANKING = ("layout", "micro x acc.", "GiB a GPU", "step ms", "rows/s", "peak", "GB sent", "collectives", "bound by")


def ranking(plans: Sequence[ClusterPlan]) -> list[str]:
    """Return a table with a line for each plan that fits."""
    rows = []
    for plan in plans:
        assert plan.step is not None, "of a plan that fits"
        sent = [f"{plan.bytes_sent() / 1e9:.2f}", f"{plan.collectives:,}"]
        rows.append([*_cells(plan), f"{plan.step.flops:.0%}", *sent, plan.step.bound])
    return table(RANKING, rows)


def _cells(plan: ClusterPlan) -> list[str]:
    """Return the columns that the ranking and the curve share."""
    return [
        plan.layout.name,
        f"{plan.micro} x {plan.accumulation}",
        f"{plan.memory.device / GIB:.1f}",
        f"{plan.seconds * 1e3:,.0f}",
        f"{plan.rows_a_second:,.0f}",
    ]


def memory_lines(plans: Sequence[ClusterPlan]) -> list[str]:
    """Return a table of GiB by purpose, a line for each plan."""
    names = [field_.name for field_ in fields(plans[0].memory)]
    rows = [
        [plan.layout.name, *(f"{getattr(plan.memory, name) / GIB:.2f}" for name in names), _fit(plan)] for plan in plans
    ]
    used = [0, *(n for n in range(1, len(names) + 1) if any(row[n] != "0.00" for row in rows)), len(names) + 1]
    head = ["GiB a GPU", *names, "fits"]
    return table([head[n] for n in used], [[row[n] for n in used] for row in rows])


def _fit(plan: ClusterPlan) -> str:
    return "yes" if plan.fits else f"lacks {plan.short / GIB:.1f}"


def time_lines(plan: ClusterPlan) -> list[str]:
    """Return lines on the duration of a run and of the parts of a step."""
    step = plan.step
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
        f"the loader needs {step.cores:.1f} cores a GPU of {plan.cluster.gpu.cores}",
    ]


CURVE = ("GPUs", "layout", "micro x acc.", "GiB a GPU", "step ms", "rows/s", "efficiency", "peak", "days", "GPU-hours")


def curve(plan_of_world: Mapping[int, ClusterPlan | RefusedError]) -> list[str]:
    """Return a table of the best plan on each number of GPUs. Efficiency: rows/s per GPU relative to the first that
    fits."""
    plans = [plan for plan in plan_of_world.values() if isinstance(plan, ClusterPlan)]
    rows = []
    for gpus, plan in plan_of_world.items():
        if isinstance(plan, RefusedError):
            rows.append([str(gpus), str(plan).partition(":")[0], *[""] * (len(CURVE) - 2)])
            continue
        assert plan.step is not None, "of a plan that fits"
        rate, first = (item.rows_a_second / item.cluster.gpus for item in (plan, plans[0]))
        shares = [f"{rate / first:.0%}", f"{plan.step.flops:.0%}"]
        rows.append([str(gpus), *_cells(plan), *shares, f"{plan.days:,.2f}", f"{plan.gpu_hours:,.0f}"])
    return table(CURVE, rows)


def describe_plan(counted: Counted, cluster: clusters.Cluster) -> Iterator[str]:
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


def assumption_lines(gpu: clusters.Gpu) -> list[str]:
    """Return the assumptions of a plan."""
    return [
        f"predicted, not measured; {gpu.name}: {gpu.peak / 1e12:.0f} TFLOP/s in bf16, {gpu.memory / GIB:.0f} GiB at "
        f"{gpu.memory_rate / 1e12:.2f} TB/s, {gpu.nvlink / 1e9:.0f} GB/s within a node, {gpu.network / 1e9:.0f} GB/s "
        f"between nodes, {gpu.cores} cores ({gpu.source})",
        *clusters.assumptions(),
        *step.assumptions(),
    ]
