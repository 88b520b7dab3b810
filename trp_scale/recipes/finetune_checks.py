"""Checks of fine-tuning's settings against each other; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.recipes.checks import general_problems
from trp_scale.recipes.classification_checks import classification_problems
from trp_scale.recipes.dense_checks import dense_problems
from trp_scale.recipes.detection_checks import detection_problems


def check_finetune(config: FinetuneConfig) -> None:
    """Refuse settings that no fine-tuning run can have, all of them in one message.

    Raises:
        RefusedError: naming each flag, the value found and the values allowed.
    """
    problems = [*general_problems(config), *_downstream(config)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise RefusedError(f"{len(problems)} setting(s) cannot be used:\n{listed}")


def _downstream(config: FinetuneConfig) -> Iterator[str]:
    downstream = config.downstream
    for name in ("dropout", "drop_path", "warmup_share"):
        value = getattr(downstream, name)
        if not 0 <= value < 1:
            yield f"--downstream.{name} is {value}, allowed: from 0 to below 1"
    if not 0 <= downstream.epochs < float("inf"):
        yield f"--downstream.epochs is {downstream.epochs}, allowed: 0 or more"
    if not 0 < config.optimizer.layer_decay <= 1:
        yield f"--optimizer.layer_decay is {config.optimizer.layer_decay}, allowed: more than 0, at most 1"
    if downstream.kind == "glue":
        if not 8 <= downstream.max_length <= config.model.max_positions:
            yield (
                f"--downstream.max_length is {downstream.max_length}, allowed: from 8 to the encoder's "
                f"{config.model.max_positions} positions"
            )
        return
    if downstream.task in (".", "..") or "/" in downstream.task:
        yield f"--downstream.task is {downstream.task!r}, allowed: the name of a directory in --run_dir, without /"
    if config.crops.size < 1 or config.crops.size % config.vision.patch_size:
        patch_size = config.vision.patch_size
        yield f"--crops.size is {config.crops.size}, allowed: multiples of the encoder's patches, {patch_size} pixels"
    if downstream.kind == "classification":
        yield from classification_problems(config)
    if downstream.kind == "detection":
        yield from detection_problems(config)
    if downstream.kind in ("segmentation", "depth"):
        yield from dense_problems(config)
    if not downstream.test_path and not config.data.validation_fraction:
        yield (
            "--data.validation_fraction is 0 and --downstream.test_path is empty: nothing is left to measure on; give "
            "one of them"
        )
