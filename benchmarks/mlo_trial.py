"""MAE against MLO-MAE at equal wall time on real images: a linear probe on a test set, several seeds.

    python benchmarks/mlo_trial.py --train data/cifar10 --test data/cifar10-test --run_dir runs/mlo_trial

Both methods train the same small ViT from the recipe mlo_mae_cifar. MAE makes `--steps` steps; MLO-MAE makes as many as
take the same time on one core, by the median ratio of a few alternating rounds measured first. Runs go one after the
other, or `--processes` at a time on a core each; finished ones are not trained again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from trp_scale.config import RefusedError
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.sweep import linear_probe
from trp_scale.downstream.trained_images import load_trained_images
from trp_scale.observe.report import read_summary
from trp_scale.recipes.arguments import parse
from trp_scale.training.pretrain import Run, unguarded

ROOT = Path(__file__).resolve().parent.parent

SMALL = {
    "model.layers": 4,
    "model.hidden_size": 128,
    "model.heads": 4,
    "model.intermediate_size": 512,
    "vision.patch_size": 4,
    "vision.decoder_layers": 1,
    "vision.decoder_hidden_size": 64,
    "vision.decoder_heads": 2,
    "batch.global_size": 64,
    "batch.micro_size": 64,
    "data.workers": 0,
    "data.validation_fraction": 0.0,
    "training.precision": "fp32",
    "optimizer.lr": 1e-3,
    "checkpoint.every": 0,
    "logging.every": 20,
    "logging.progress": "false",
}
"""A ViT that two cores can train; the rest is as in mlo_mae_cifar."""

METHODS: dict[str, dict[str, str | int | float]] = {
    "MAE": {"multilevel.kind": "none"},
    "MLO-MAE": {"multilevel.hidden_size": 128, "multilevel.head_norm": "layer", "multilevel.head_lr": 1e-2},
}
"""What differs. MAE sees all of the training set, MLO-MAE's encoder the 80 % that are D_tr, as in the paper."""

ROUNDS, ROUND_STEPS = 5, 6
"""Of the measurement of the ratio; steps are whole cycles."""

SECONDS = "processor_seconds.json"
"""In each run's directory, start and checkpoint included."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a run gave. Attributes: steps; processor seconds; accuracy of the linear probe on the test set."""

    steps: int
    seconds: float
    accuracy: float


@dataclass(kw_only=True)
class Options:
    train: Path
    """Sharded training images with classes."""
    test: Path
    """Sharded test images."""
    run_dir: Path
    """Directory of all runs."""
    steps: int = 3000
    """Of MAE."""
    seeds: int = 3
    """Runs of each method."""
    processes: int = 1
    """Runs at a time, each on a core."""
    settings: list[str] = field(default_factory=list)
    """SECTION.FIELD=VALUE, of both methods."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = tyro.cli(Options, args=argv, description=__doc__, use_underscores=True)
    settings = {**SMALL, "data.path": arguments.train, **dict(each.split("=", 1) for each in arguments.settings)}
    ratio = measured_ratio(arguments.run_dir, settings)
    steps = {"MAE": arguments.steps, "MLO-MAE": max(2, round(arguments.steps / ratio))}
    with ThreadPoolExecutor(arguments.processes) as pool:
        pending = {
            (method, seed): pool.submit(
                trial, arguments.run_dir / f"{method}-{seed}", method, seed, steps[method], settings, arguments.test
            )
            for seed in range(arguments.seeds)
            for method in METHODS
        }
        found = {key: each.result() for key, each in pending.items()}
    Console(width=100).print(table_of(found, ratio, arguments.seeds))


def measured_ratio(directory: Path, settings: dict[str, object]) -> float:
    """Processor seconds of a step of MLO-MAE's over MAE's on one core: median over rounds of whole cycles that
    alternate in one process; kept with the runs."""
    stored = directory / "ratio.json"
    if stored.exists():
        return float(json.loads(stored.read_text())["ratio"])
    torch.set_num_threads(1)
    with Environment() as environment, tempfile.TemporaryDirectory() as temporary:
        steps = {}
        for method, own in METHODS.items():
            run_dir = Path(temporary) / method
            run_dir.mkdir()
            flags = flags_of(run_dir, {**settings, **own, "training.steps": 1000})
            steps[method] = Run(parse(flags), environment, run_dir, "plain", unguarded(run_dir)).trainer.train_step
        rounds = []
        for _ in range(1 + ROUNDS):
            seconds = {
                method: statistics.fmean(timed(step) for _ in range(ROUND_STEPS)) for method, step in steps.items()
            }
            rounds.append(seconds["MLO-MAE"] / seconds["MAE"])
    ratio = statistics.median(rounds[1:])  # the first is for warming up
    directory.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps({"ratio": ratio, "rounds": rounds}))
    return ratio


def timed(step: Callable[[], object]) -> float:
    """Processor seconds of one step."""
    began = time.process_time()
    step()
    return time.process_time() - began


def trial(directory: Path, method: str, seed: int, steps: int, settings: dict[str, object], test: Path) -> Trial:
    """Train, unless it is finished, and probe."""
    if read_summary(directory).get("exit_reason") != "finished":
        run(directory, {**settings, **METHODS[method], "training.seed": seed, "training.steps": steps})
    accuracy = directory / "probe.json"
    if not accuracy.exists():
        trained = load_trained_images(directory)
        accuracy.write_text(json.dumps(linear_probe(trained, size=trained.config.crops.size, test=test)))
    seconds = float(json.loads((directory / SECONDS).read_text()))
    return Trial(steps=steps, seconds=seconds, accuracy=float(json.loads(accuracy.read_text())))


def run(directory: Path, settings: dict[str, object]) -> None:
    """One run of `trp-scale pretrain`, on one core; its processor seconds go into processor_seconds.json.

    Raises:
        RefusedError: it did not finish.
    """
    command = [sys.executable, "-m", "trp_scale", "pretrain", *flags_of(directory, settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRP_SCALE_PROGRESS": "plain"}
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output, text=True)
        _, status, used = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        if started.returncode:
            output.seek(0)
            raise RefusedError(f"{directory}: exit status {started.returncode}\n{output.read()[-3000:]}")
    (directory / SECONDS).write_text(json.dumps(used.ru_utime + used.ru_stime))


def flags_of(directory: Path, settings: dict[str, object]) -> list[str]:
    """Command line of a run."""
    flags = [word for name, value in {"run_dir": directory, **settings}.items() for word in (f"--{name}", str(value))]
    return ["--recipe", "mlo_mae_cifar", *flags]


def table_of(found: dict[tuple[str, int], Trial], ratio: float, seeds: int) -> Table:
    """Methods by seeds."""
    table = Table(
        title=f"linear probe on the test set at equal wall time (a step of MLO-MAE takes {ratio:.2f} of MAE's)"
    )
    for column in ("method", "steps", "core minutes", *(f"seed {seed}" for seed in range(seeds)), "mean ± deviation"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in METHODS:
        runs = [found[method, seed] for seed in range(seeds)]
        accuracies = [100 * each.accuracy for each in runs]
        deviation = statistics.stdev(accuracies) if seeds > 1 else 0.0
        table.add_row(
            method,
            str(runs[0].steps),
            f"{statistics.fmean(each.seconds for each in runs) / 60:.1f}",
            *(f"{accuracy:.2f}" for accuracy in accuracies),
            f"{statistics.fmean(accuracies):.2f} ± {deviation:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
