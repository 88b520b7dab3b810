"""Command line of `trp-scale finetune`; it is read without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config import AVERAGE, RefusedError, Weights
from trp_scale.config.checks import check
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.loader import data_command
from trp_scale.config.run_flags import Arguments, parse_run
from trp_scale.config.settings import check_settings, setting
from trp_scale.data.mixture import require_data, require_made

SCRATCH = "scratch"
"""As --from: no pre-training, the seed's weights in the recipe's sizes."""


@dataclass(kw_only=True)
class FinetuneArguments(Arguments):
    """Fine-tune a pre-trained encoder on a downstream task, over seeds, and measure it: results.json and a table."""

    config: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)
    """The settings: the recipe's, changed by the flags."""
    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|DIR|scratch")] = ""
    """The encoder: a run directory of trp-scale pretrain, an export, a directory of transformers (BERT, ViTMAE) or of
    timm (ViT); scratch: no pre-training, in the sizes of the recipe. Of a run its newest checkpoint is taken: where
    the run goes on, name the checkpoint itself to repeat the command."""
    weights: Weights = "last"
    """Of a run with the hook weight_average: average takes the average of its weights in place of the last ones."""
    seeds: int = setting(1, at_least=1)
    """Runs of each task, with training.seed, training.seed + 1, ..."""
    task: str = ""
    """GLUE: a task, several with commas between, or all; empty = the recipe's --downstream.task."""
    only: int | None = None
    """Of the runs, each task with each seed in this order, only that with this number, from 0. For job arrays; the same
    command without it makes what is missing and joins all."""
    baseline: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of another finetune: the table gives differences to it."""


def parse_finetune(argv: Sequence[str]) -> FinetuneArguments:
    """Read the command line, take the encoder's sizes, and check all settings.

    Raises:
        RefusedError, SystemExit: as recipes.arguments.parse, or no such encoder.
    """
    arguments = parse_run(argv, FinetuneArguments, FinetuneConfig, prog="trp-scale finetune")
    config = arguments.config
    if not arguments.from_:
        raise RefusedError(
            f"--from is missing; allowed: a run directory, an export, a directory of transformers or timm, or {SCRATCH}"
        )
    tasks = config.tasks(arguments.task)
    require_made(config.data.path, data_command(arguments.recipe, config.data.path))
    require_data(config.datasets())
    config.require_data(tasks)
    if arguments.weights == "average":
        arguments.from_ += AVERAGE
    if arguments.from_ != SCRATCH:
        from trp_scale.finetuning.encoders import open_encoder

        open_encoder(arguments.from_).adopt(config)
    check_settings(arguments)
    if arguments.resume not in ("auto", "never"):
        raise RefusedError(
            f"--resume {arguments.resume}: allowed: auto or never; repeat --run_dir to go on with its runs"
        )
    if arguments.only is not None:
        runs = len(tasks) * arguments.seeds
        if not 0 <= arguments.only < runs:
            raise RefusedError(
                f"--only is {arguments.only}, allowed: 0 ... {runs - 1} ({len(tasks)} tasks x {arguments.seeds} seeds)"
            )
        if arguments.run_dir is None:
            raise RefusedError("--only needs --run_dir, the same for all runs: each would make a directory of its own")
    check(config)
    return arguments
