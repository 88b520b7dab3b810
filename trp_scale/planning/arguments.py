"""Command line of `trp-scale plan`: flags of a run, and the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config import PretrainConfig, RefusedError
from trp_scale.config.checks import check
from trp_scale.config.run_flags import Arguments, parse_run
from trp_scale.config.settings import check_settings, setting

NO_DATA = "(none)"
"""Placeholder of --data.path in a plan without data."""


@dataclass(kw_only=True)
class PlanArguments(Arguments):
    """Plan a pre-training run on a cluster without a GPU: for each engine, ZeRO stage and activation checkpointing, the
    memory per GPU, the largest micro-batch, the communication and the time of a step; the fastest first, with command
    lines. All other --section.field flags are those of `trp-scale pretrain`; without --data.path the flags give the
    shapes of the data."""

    gpus: int = setting(8, at_least=1)
    """Number of GPUs."""
    gpu: str = "a100-80"
    """a100-40, a100-80, h100 or h200."""
    predict: str = ""
    """Numbers of GPUs for a scaling curve, such as 8,64,256,1024."""
    best: int = setting(5, at_least=1)
    """Number of layouts to list with their commands."""
    length: int = 0
    """Text: tokens per sequence; 0 = --model.max_positions."""
    vocabulary: int = setting(30522, at_least=1)
    """Text: vocabulary size of the tokenizer."""
    semseg_classes: int = setting(133, at_least=1)
    """Images with segmentation maps: number of classes (133 in COCO's panoptic maps, as in MultiMAE)."""
    run_dir: Annotated[Path | None, tyro.conf.Suppress] = None
    resume: Annotated[str, tyro.conf.Suppress] = "auto"
    dry_run: Annotated[bool, tyro.conf.Suppress] = True
    print_config: Annotated[bool, tyro.conf.Suppress] = False
    local_rank: Annotated[int, tyro.conf.Suppress] = -1

    def worlds(self) -> list[int]:
        """Return the numbers of --predict, ascending; refuse other text."""
        words = [word.strip() for word in self.predict.split(",") if word.strip()]
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise RefusedError(f"--predict {self.predict}: allowed: numbers of GPUs with commas, such as 8,64,256")
        return sorted({int(word) for word in words})


def parse_plan(argv: Sequence[str]) -> PlanArguments:
    """Read and check the command line. Raises RefusedError: as `config.run_flags.parse`; also for invalid numbers."""
    arguments = parse_run(argv, PlanArguments, PretrainConfig, prog="trp-scale plan")
    arguments.config.data.path = arguments.config.data.path or NO_DATA
    check(arguments.config)
    check_settings(arguments)
    arguments.choose_engine(arguments.gpus)
    arguments.worlds()
    return arguments
