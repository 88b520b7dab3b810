"""What each balancer makes of each task: small recipes, several seeds, equal steps, held-out losses."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trp_scale.config import RefusedError
from trp_scale.observe.metrics import read_history
from trp_scale.observe.report import read_summary
from trp_scale.recipes.loader import load_recipe

BALANCERS = ("uniform", "minimax", "uncertainty", "gradnorm", "dwa")
ROOT = Path(__file__).resolve().parent.parent

FEWEST = 30
"""A task with fewer held-out elements is not looked at for the worst: its loss is noise."""

FLAGS = {
    "uncertainty": ["--balancer.lr", "0.02"],  # the default is for 100,000s of steps
    "dwa": ["--balancer.interval_steps", "20"],  # an epoch is most of these runs
}
"""What short runs need."""

WIDTH = 120
"""Of the table, whatever the terminal's."""

Losses = dict[str, tuple[float, int]]
"""Held-out loss and elements of each balanced task of a run."""


def print_outcome(recipes: Sequence[str], run_dir: Path, *, seeds: int, steps: int, processes: int) -> None:
    """Train what is not finished, then print one table for each recipe.

    Raises:
        RefusedError: a run did not finish.
    """
    for recipe in recipes:
        length = steps or load_recipe(recipe).training.steps
        runs = {
            (balancer, seed): run_dir / f"{recipe}-{length}" / f"{balancer}-{seed}"
            for seed in range(seeds)
            for balancer in BALANCERS
        }
        with ThreadPoolExecutor(processes) as pool:
            done = {key: pool.submit(train, recipe, *key, directory, length) for key, directory in runs.items()}
            losses = {key: future.result() for key, future in done.items()}
        Console(width=WIDTH).print(table_of(recipe, losses, length))


def train(recipe: str, balancer: str, seed: int, directory: Path, steps: int) -> Losses:
    """One run, unless it is finished; its held-out losses at the end."""
    if read_summary(directory).get("exit_reason") != "finished":
        settings = {
            "run_dir": directory,
            "balancer.kind": balancer,
            "batch.micro_size": load_recipe(recipe).batch.global_size,  # minimax then needs no forward pass of its own
            "training.seed": seed,
            "training.steps": steps,
            "validation.every": steps,
            "checkpoint.keep": 1,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "trp_scale", "pretrain", "--recipe", recipe, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRP_SCALE_PROGRESS": "plain"}
        ended = subprocess.run(
            [*command, *FLAGS.get(balancer, [])], env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise RefusedError(f"{directory}: exit status {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr}")
    history = read_history(directory)
    assert history.validation is not None, f"{directory}: no validation was logged"
    found = {name: task for name, task in history.validation["tasks"].items() if name not in history.outside_tasks}
    return {name: (float(task["loss"]), int(task["count"])) for name, task in found.items() if task["count"]}


def table_of(recipe: str, losses: dict[tuple[str, int], Losses], steps: int) -> Table:
    """Tasks by balancers: mean and standard deviation over the seeds; then the worst of the tasks, and their mean."""
    names = list(dict.fromkeys(name for run in losses.values() for name in run))  # a seed may hold out none of a task
    seeds = 1 + max(seed for _, seed in losses)
    rare = [name for name in names if min(run.get(name, (0.0, 0))[1] for run in losses.values()) < FEWEST]
    table = Table(title=f"{recipe}, {steps} steps, {seeds} seeds: held-out loss", caption=caption(rare))
    table.add_column("task")
    table.add_column("elements", justify="right")
    for balancer in BALANCERS:
        table.add_column(balancer, justify="right")
    of = {balancer: [losses[balancer, seed] for seed in range(seeds)] for balancer in BALANCERS}
    for name in names:
        counts = [run[name][1] for run in losses.values() if name in run]
        cells = [spread([run[name][0] for run in runs if name in run]) for runs in of.values()]
        table.add_row(name, f"{min(counts):,}", *cells)
    table.add_section()
    for title, over in (("worst", max), ("mean", statistics.fmean)):
        cells = [spread([over(counted(run, rare)) for run in runs]) for runs in of.values()]
        table.add_row(title, "", *cells)
    return table


def counted(run: Losses, rare: Sequence[str]) -> list[float]:
    """Losses of the tasks that have enough held-out elements with every seed: the same tasks in all runs."""
    return [loss for name, (loss, _) in run.items() if name not in rare]


def caption(rare: Sequence[str]) -> str:
    """What worst and mean leave out."""
    return f"worst and mean leave out {', '.join(rare)}: fewer than {FEWEST} elements with some seed" if rare else ""


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {deviation:.4f}"
