"""`trp-scale plan` and `trp-scale pretrain --dry_run`: predict the layout of a run on a cluster, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trp_scale.config import RefusedError
from trp_scale.config.flags import is_rank_zero_env
from trp_scale.config.run_flags import Arguments
from trp_scale.data.mixture import parse_paths
from trp_scale.distributed.launchers import discover
from trp_scale.engines import ds_config
from trp_scale.planning import tables
from trp_scale.planning.arguments import NO_DATA, PlanArguments
from trp_scale.planning.clusters import GPUS, Cluster, Gpu, find_gpu
from trp_scale.planning.counting import Counted
from trp_scale.planning.layouts import LayoutChoice
from trp_scale.planning.plan import ClusterPlan, fitting, make_plans, refusal
from trp_scale.pretraining.base import DataFacts, find_upstream


def print_plan(arguments: PlanArguments) -> int:
    """`trp-scale plan`."""
    facts, whence = read_data_facts(arguments)
    counted = Counted(arguments.config, facts)
    choices = fixed_layout(arguments)
    cluster = Cluster(gpu=find_gpu(arguments.gpu), gpus=arguments.gpus)
    for line in report(counted, cluster, choices, recipe=arguments.recipe, best=arguments.best):
        print(line, flush=True)
    if worlds := arguments.worlds():
        print("", *tables.curve(best_on(counted, cluster.gpu, worlds, choices)), sep="\n", flush=True)
    print("\nassumed:")
    print("\n".join(f"- {line}" for line in [whence, *tables.assumption_lines(cluster.gpu)]))
    return 0


def read_data_facts(arguments: PlanArguments) -> tuple[DataFacts, str]:
    """Return the shapes of the data and their origin: the data set if it exists, otherwise the flags."""
    path = arguments.config.data.path
    if path != NO_DATA and all((member.path / "dataset.json").is_file() for member in parse_paths(path)):
        return find_upstream(arguments.config).facts(arguments.config), f"shapes from {path}"
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


def report(
    counted: Counted, cluster: Cluster, choices: LayoutChoice, *, recipe: str = "", best: int = 0
) -> Iterator[str]:
    """Yield the `best` fastest layouts with memory, time and commands; 0 = only the layout that the settings state.
    Raises RefusedError: nothing fits; names the nearest plan that does."""
    yield from tables.describe_plan(counted, cluster)
    plans = [plan for plan in make_plans(counted, cluster, choices) if best or plan.layout.is_stated(counted.config)]
    plans_that_fit = fitting(plans)
    if not plans_that_fit:
        raise refusal(counted, plans, choices)
    yield from ["", *tables.ranking(plans_that_fit[: best or None]), "", *tables.memory_lines(plans), ""]
    if best:
        yield f"best: {plans_that_fit[0].layout.name}"
    yield from tables.time_lines(plans_that_fit[0])
    if best:
        yield ""
        yield from (f"{number}. {plan.command(recipe)}" for number, plan in enumerate(plans_that_fit[:best], 1))


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


def dry_run(arguments: Arguments, world: int) -> Iterator[str]:
    """Yield the plan of a `trp-scale pretrain` command on its ranks, with the shapes of its data. Raises RefusedError:
    it does not fit."""
    gpu, assumed = this_gpu()
    config = arguments.config
    counted = Counted(config, find_upstream(config).facts(config))
    choices = replace(fixed_layout(arguments), engine=arguments.choose_engine(world))
    yield from report(counted, Cluster(gpu=gpu, gpus=world), choices)
    yield "\nassumed:"
    yield from (f"- {line}" for line in [*assumed, *tables.assumption_lines(gpu)])


def this_gpu() -> tuple[Gpu, list[str]]:
    """Return this machine's GPU or an assumed one, and the assumption."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0).lower()
        large = torch.cuda.get_device_properties(0).total_memory > 50 * 2**30
        for known in GPUS.values():
            kind, _, size = known.name.partition("-")
            if kind in name and (not size or (size == "80") == large):
                return known, []
        return GPUS["a100-80"], [f"this machine's {name} is unknown; assumed: a100-80"]
    return GPUS["a100-80"], ["this machine has no GPU; assumed: a100-80 (select another by trp-scale plan --gpu)"]


def print_dry_run(arguments: Arguments) -> int:
    """Print the plan of `trp-scale pretrain --dry_run` on rank 0."""
    if is_rank_zero_env():
        for line in dry_run(arguments, discover(os.environ).world):
            print(line, flush=True)
    return 0
