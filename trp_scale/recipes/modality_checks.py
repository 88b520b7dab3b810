"""Checks of the settings of multi-modal masked autoencoders; every message names the flag to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trp_scale.config import Config
from trp_scale.config.modalities import predicted


def modality_problems(config: Config) -> Iterator[str]:
    """Settings that no MM-MAE can have. Sizes and crops are checked with those of the other masked autoencoders."""
    yield from _lists(config)
    yield from _model(config)
    yield from _numbers(config)


def _lists(config: Config) -> Iterator[str]:
    given: dict[str, Sequence[str]] = {"inputs": config.modalities.inputs, "outputs": config.modalities.outputs}
    for name, found in given.items():
        if not found:
            yield f"--modalities.{name} is empty; allowed: one modality or more, for example rgb depth semseg"
        if repeated := sorted({each for each in found if found.count(each) > 1}):
            yield f"--modalities.{name} has {', '.join(repeated)} more than once; allowed: each once"


def _model(config: Config) -> Iterator[str]:
    """What the other masked autoencoders leave open and this one does not."""
    for flag, found, allowed, why in (
        ("--vision.tokens", config.vision.tokens, "visible", "only visible patches enter the encoder"),
        ("--vision.decoder", config.vision.decoder, "transformer", "each task's queries look at the visible patches"),
        ("--vision.positions", config.vision.positions, "absolute", "patches of all modalities are in one sequence"),
        ("--crops.count", config.crops.count, 1, "all modalities of an image share one crop"),
        ("--crops.from", config.crops.from_, "image", "all modalities of an image share one crop"),
    ):
        if found != allowed:
            yield f"{flag} is {found}, allowed with --upstream mm_mae: {allowed} ({why})"


def _numbers(config: Config) -> Iterator[str]:
    modalities, patch_size = config.modalities, config.vision.patch_size
    if not 0 < modalities.concentration < math.inf:
        yield f"--modalities.concentration is {modalities.concentration}, allowed: more than 0"
    inputs, size = len(modalities.inputs), config.crops.size
    patches = (size // patch_size) ** 2 if patch_size > 0 else 0
    # What is no input is masked everywhere, and all inputs may then be seen.
    hidden = any(predicted(task).name not in modalities.inputs for task in modalities.outputs)
    most = inputs * patches - (0 if hidden else 1)
    if inputs and patches and not 0 < modalities.visible_tokens <= most:
        yield (
            f"--modalities.visible_tokens is {modalities.visible_tokens}, allowed: 1 to {most}, since --crops.size "
            f"{size} has {patches} patches in each of {inputs} input(s) and a patch must be masked that is predicted"
        )


def unread_modalities(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that an MM-MAE does not read, each with the reason."""
    if len(config.modalities.inputs) == 1:
        yield "modalities.concentration", "a single one of --modalities.inputs"
