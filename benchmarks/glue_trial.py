"""What an encoder reaches on GLUE in short runs, beside the model without pre-training and the constant prediction.

    python benchmarks/glue_trial.py --data GLUE --encoder RUN --run_dir DIR [--tasks sst2,cola] [--steps 400]

Recipe glue_tiny; every run has as many steps, whatever the task's size.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale import cli
from trp_scale.downstream.arguments import SCRATCH
from trp_scale.downstream.encoder_source import open_encoder
from trp_scale.downstream.results import TaskResult, constant_of, read_results


@dataclass(kw_only=True)
class Options:
    """What to try."""

    data: Path
    """The GLUE directory."""
    encoder: str
    """As --from of trp-scale finetune."""
    run_dir: Path
    """For the runs; those that are there already are not run again."""
    tasks: str = "sst2"
    """With commas between."""
    steps: int = 400
    """Optimizer steps of each run, of 32 rows."""
    seeds: int = 3
    """Runs of each task."""
    lr: float = 5e-4
    """Peak learning rate."""


def run(options: Options, source: str, run_dir: Path) -> dict[str, TaskResult]:
    """What one encoder reaches, by task."""
    tokenizer = open_encoder(options.encoder).tokenizer
    settings = {
        "recipe": "glue_tiny",
        "from": source,
        "task": options.tasks,
        "seeds": options.seeds,
        "run_dir": run_dir,
        "data.path": options.data,
        "downstream.tokenizer": tokenizer,
        "downstream.epochs": 0,
        "training.steps": options.steps,
        "optimizer.lr": options.lr,
        "logging.progress": "false",
        "logging.every": 100,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    if status := cli.main(["finetune", *flags]):
        raise SystemExit(status)
    return {task.task: task for task in read_results(run_dir).tasks}


def main(options: Options) -> None:
    found = {
        "pre-trained": run(options, options.encoder, options.run_dir / "pretrained"),
        "scratch": run(options, SCRATCH, options.run_dir / "scratch"),
    }
    for task in options.tasks.split(","):
        first = found["scratch"][task]
        constant = constant_of(first)
        print(f"{task}, {first.metric}: constant prediction {'not known' if constant is None else f'{constant:.4f}'}")
        for name, results in found.items():
            one = results[task].values
            spread = np.std(one, ddof=1) if len(one) > 1 else 0.0
            print(f"  {name}: {np.mean(one):.4f} +- {spread:.4f} ({', '.join(f'{value:.4f}' for value in one)})")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
