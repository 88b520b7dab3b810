"""Estimate the cost of a study: with the planner for named GPUs, otherwise from FLOPs and the speed of this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from trp_scale.config import Config
from trp_scale.planning.clusters import NO_DATA, NO_MIXTURE, Cluster, PlanArguments, find_gpu, parse_plan
from trp_scale.planning.command import fixed_layout, read_data_facts
from trp_scale.planning.counting import Counted
from trp_scale.planning.plan import extra_passes, fitting, make_plans, prepass, refusal
from trp_scale.studies.execute import NodeState, has_finished, read_states
from trp_scale.studies.graph import Graph
from trp_scale.studies.study import Flags, Scale, Study, needed_inputs, to_arguments

START_SECONDS = 8.0
"""CPU seconds that a command needs for its imports."""

EFFICIENCY = 0.35
"""Share of a core's matrix product speed that a step of a small model reaches."""


def planned_hours(study: Study, scale: Scale, *, price: float) -> Iterator[str]:
    """Yield the lines of the plan. Raises RefusedError for invalid settings, or if no layout fits.

    Args:
        price: per hour of a GPU or a core.
    """
    graph = Graph(study, scale, Path("runs/study"), dict.fromkeys(needed_inputs(study, scale), NO_DATA))
    speed = 0.0 if scale.gpus else measured_speed()
    where = f"{scale.gpus} x {scale.gpu}" if scale.gpus else f"this machine's cores, {speed / 1e9:.0f} GFLOP/s each"
    yield f"{study.title}: {len(graph.nodes)} commands, {scale.seeds} pre-training seeds, on {where}"
    total = 0.0
    runs = {name: sum(node.startswith(f"runs/{name}/") for node in graph.nodes) for name in graph.variants}
    costs = {name: run_cost(graph, name, speed) for name in graph.trained_variants()}
    for name, (steps, seconds) in costs.items():
        hours = runs[name] * steps * seconds / 3600
        total += hours
        yield f"  {name}: {runs[name]} runs of {steps:,} steps, {seconds:.4g} s a step: {hours:.2f} hours"
        if "time" in scale.budgets and name != study.baseline:
            hours = runs[name] * math.prod(costs[study.baseline]) / 3600
            total += hours
            yield f"  {name}, equal time: as long as the baseline's: {hours:.2f} hours"
    if scale.tuning is not None:
        tries = len(scale.tuning.values)
        for name in graph.trained_variants():
            total += tries * math.prod(run_cost(graph, name, speed, scale.tuning.flags)) / 3600
        yield f"  included: {tries} values of {scale.tuning.setting} for each variant"
    commands = 0.0 if scale.gpus else len(graph.nodes) * START_SECONDS / 3600
    unit = f"hours of {scale.gpus} GPUs" if scale.gpus else "core hours"
    yield f"pre-training: {total:.2f} {unit}" + (f", and {commands:.2f} to start commands" if commands else "")
    yield "not included: judging and data preparation; --run_dir DIR estimates them from commands that have finished"
    if price:
        yield f"price: {(total + commands) * max(1, scale.gpus) * price:,.2f} at {price:g} an hour"
    if not scale.gpus:
        yield f"assumed: a step reaches {EFFICIENCY:.0%} of the speed of one core's matrix products"


def hours_left(graph: Graph) -> Iterator[str]:
    """Yield the remaining hours by kind of command, from the seconds of finished commands of that kind."""
    kinds: dict[str, list[NodeState | None]] = {}
    for node, state in read_states(graph).items():
        kind = "/".join(node.split("/")[:2])
        kinds.setdefault(kind, []).append(state if has_finished(state) else None)
    finished = sum(state is not None for ended in kinds.values() for state in ended)
    yield f"{graph.directory}: {finished} of {len(graph.nodes)} commands have finished"
    total = 0.0
    for kind, ended in kinds.items():
        seconds, remaining = [state.seconds for state in ended if state is not None], ended.count(None)
        if not remaining:
            continue
        if not seconds:
            yield f"  {kind}: {remaining} left, none finished yet: not included"
            continue
        hours = remaining * statistics.fmean(seconds) / 3600
        total += hours
        yield f"  {kind}: {remaining} left, {statistics.fmean(seconds):.4g} s each by {len(seconds)}: {hours:.2f} hours"
    yield f"left: {total:.2f} hours of commands; divide by --jobs"


def run_cost(graph: Graph, variant: str, speed: float, changes: Flags | None = None) -> tuple[int, float]:
    """Estimate the steps of one run of a variant, and the seconds per step.

    Args:
        speed: FLOP/s of a core; used if the scale has no GPUs.
        changes: further settings.
    """
    arguments = _arguments(graph, variant, changes or {})
    counted = Counted(arguments.config, read_data_facts(arguments)[0])
    config: Config = arguments.config
    if graph.scale.gpus:
        cluster = Cluster(gpu=find_gpu(graph.scale.gpu), gpus=graph.scale.gpus)
        layout = fixed_layout(arguments)
        plans = make_plans(counted, cluster, layout)
        if not (plans_that_fit := fitting(plans)):
            raise refusal(counted, plans, layout)
        return config.training.steps, plans_that_fit[0].seconds
    micro = config.batch.micro_rows
    accumulation = max(1, config.batch.global_size // micro)
    forward, backward = (part.total_flops(micro) for part in counted.passes("none", False, False).values())
    times = extra_passes(counted, 1)
    flops = accumulation * (times * (forward + backward) + prepass(config, accumulation) * forward)
    return config.training.steps, flops / (EFFICIENCY * speed)


def _arguments(graph: Graph, variant: str, changes: Flags) -> PlanArguments:
    flags = {**graph.settings(variant), **changes, "model.weights": ""}  # no weights are read: the recipe has the sizes
    recipe = flags.pop("recipe", graph.scale.recipe)
    if not (Path(str(flags.get("data.path", ""))) / "dataset.json").is_file():
        by_source = "sources" in str(flags.get("objective.tasks", ""))
        flags["data.path"] = NO_MIXTURE if by_source else NO_DATA  # the recipe's path may exist in this directory
    length = flags.get("model.max_positions", 0)
    vocabularies = [data.flags["vocab_size"] for data in graph.scale.data.values() if "vocab_size" in data.flags]
    known: Flags = {
        **({"length": length} if length else {}),
        **({"vocabulary": vocabularies[0]} if vocabularies else {}),
    }
    return parse_plan(["--recipe", str(recipe), *to_arguments(flags), *to_arguments(known)])


def measured_speed() -> float:
    """Measure fp32 matrix products on one core for 0.3 s. Return the best FLOP/s."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        side, best = 512, float("inf")
        matrix = torch.randn(side, side)
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            start = time.perf_counter()
            matrix @ matrix
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2.0 * side**3 / best
