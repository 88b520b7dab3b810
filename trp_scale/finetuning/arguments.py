"""Command line of `trp-scale finetune`; it is read without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config import AVERAGE, RefusedError, Weights
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import check
from trp_scale.config.registry import check_settings, setting
from trp_scale.config.run_flags import Arguments, parse_run
from trp_scale.data.mixture import require_run_data

SCRATCH = "scratch"
"""Value of --from for training from scratch, with the recipe's sizes."""


@dataclass(kw_only=True)
class FinetuneArguments(Arguments):
    """Fine-tune a pre-trained encoder on a downstream task over seeds, evaluate it, and write results.json."""

    config: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)
    """Settings of the recipe, overridden by flags."""
    start_from: Annotated[str, tyro.conf.Suppress] = ""
    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")] = ""
    """Encoder: a run directory of trp-scale pretrain, an export, or a model directory of transformers (BERT,
    ModernBERT, ViTMAE) or timm (ViT). A run's newest checkpoint is used; if the run is still training, name a
    checkpoint to make the command repeatable. scratch: no pre-training, with the recipe's sizes."""
    weights: Weights = "last"
    """average: use the averaged weights of a run that was trained with the hook weight_average."""
    seeds: int = setting(1, at_least=1)
    """Number of runs for each task, with training.seed, training.seed + 1, ..."""
    task: str = ""
    """GLUE: a task, a comma-separated list, or all; empty = the recipe's --downstream.task."""
    only: int | None = None
    """Train only the run with this index, for job arrays. Runs are counted from 0, task by task, seed by seed. The same
    command without --only trains the missing runs and joins all results."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of another finetune command; the table shows the difference to its results."""


def parse_finetune(argv: Sequence[str]) -> FinetuneArguments:
    """Read and check the command line. Raises RefusedError: as `config.run_flags.parse`; also for a missing encoder or
    data."""
    return check_finetune(parse_run(argv, FinetuneArguments, FinetuneConfig, prog="trp-scale finetune"))


def check_finetune(arguments: FinetuneArguments) -> FinetuneArguments:
    """Copy the encoder's sizes into the settings, and check all settings. Raises as `parse_finetune`."""
    config = arguments.config
    if not arguments.from_:
        raise RefusedError(
            f"--from is missing; allowed: a run directory, an export, a directory of transformers or timm, or {SCRATCH}"
        )
    tasks = config.tasks(arguments.task)
    require_run_data(arguments)
    config.require_data(tasks)
    if arguments.weights == "average":
        arguments.from_ += AVERAGE
    if arguments.from_ != SCRATCH:
        from trp_scale.finetuning.encoders import open_encoder

        open_encoder(arguments.from_).adopt(config)
    check_settings(arguments)
    if arguments.resume not in ("auto", "never"):
        raise RefusedError(f"--resume {arguments.resume}: allowed: auto or never; repeat --run_dir to resume its runs")
    if arguments.only is not None:
        runs = len(tasks) * arguments.seeds
        if not 0 <= arguments.only < runs:
            raise RefusedError(
                f"--only is {arguments.only}, allowed: 0 ... {runs - 1} ({len(tasks)} tasks x {arguments.seeds} seeds)"
            )
        if arguments.run_dir is None:
            raise RefusedError("--only needs --run_dir, the same for all runs; else each run creates its own directory")
    check(config)
    return arguments
