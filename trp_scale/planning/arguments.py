"""The command line of `trp-scale plan`: that of a run, and the cluster."""

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
"""Stands for --data.path where a plan is made without data."""


@dataclass(kw_only=True)
class PlanArguments(Arguments):
    """Plan a pre-training run on a cluster, without a GPU: for each engine, ZeRO stage and way of checkpointing
    activations the memory of a GPU, the micro-batch that fits, what the ranks send each other, and the time of a step;
    the fastest first, with their command lines. Every other --section.field flag is as for `trp-scale pretrain`;
    without --data.path the shapes of the data are the flags'."""

    gpus: int = setting(8, at_least=1)
    """In all."""
    gpu: str = "a100-80"
    """a100-40, a100-80, h100 or h200."""
    predict: str = ""
    """Numbers of GPUs to draw the curve over, such as 8,64,256,1024."""
    best: int = setting(5, at_least=1)
    """Layouts that are listed with their commands."""
    length: int = 0
    """Text: pieces of a sequence; 0 = --model.max_positions."""
    vocabulary: int = setting(30522, at_least=1)
    """Text: pieces of the tokenizer."""
    semseg_classes: int = setting(133, at_least=1)
    """Images with segmentation maps: classes in them (133 of COCO's panoptic maps, as MultiMAE has)."""
    run_dir: Annotated[Path | None, tyro.conf.Suppress] = None
    resume: Annotated[str, tyro.conf.Suppress] = "auto"
    dry_run: Annotated[bool, tyro.conf.Suppress] = True
    print_config: Annotated[bool, tyro.conf.Suppress] = False
    local_rank: Annotated[int, tyro.conf.Suppress] = -1

    def worlds(self) -> list[int]:
        """The numbers of --predict, ascending.

        Raises:
            RefusedError: they are no numbers.
        """
        words = [word.strip() for word in self.predict.split(",") if word.strip()]
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise RefusedError(f"--predict {self.predict}: allowed: numbers of GPUs with commas, such as 8,64,256")
        return sorted({int(word) for word in words})


def parse_plan(argv: Sequence[str]) -> PlanArguments:
    """Read the command line.

    Raises:
        RefusedError: as `recipes.arguments.parse`, and for numbers that cannot be.
    """
    arguments = parse_run(argv, PlanArguments, PretrainConfig, prog="trp-scale plan")
    arguments.config.data.path = arguments.config.data.path or NO_DATA
    check(arguments.config)
    check_settings(arguments)
    arguments.choose_engine(arguments.gpus)
    arguments.worlds()
    return arguments
