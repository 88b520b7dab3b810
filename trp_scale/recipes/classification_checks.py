"""Checks of the settings of image classification; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config.finetuning import FinetuneConfig

MOST_MAGNITUDE = 10


def classification_problems(config: FinetuneConfig) -> Iterator[str]:
    """Settings that no classification can have."""
    augmentation, crops, micro_size = config.augmentation, config.crops, config.batch.micro_size
    if not 0 <= augmentation.magnitude <= MOST_MAGNITUDE:
        yield f"--augmentation.magnitude is {augmentation.magnitude}, allowed: from 0 (none) to {MOST_MAGNITUDE}"
    for name in ("magnitude_deviation", "colour_jitter", "mixup", "cutmix"):
        value = getattr(augmentation, name)
        if not 0 <= value < float("inf"):
            yield f"--augmentation.{name} is {value}, allowed: 0 or more"
    for name in ("erasing", "mixing"):
        value = getattr(augmentation, name)
        if not 0 <= value <= 1:
            yield f"--augmentation.{name} is {value}, allowed: from 0 to 1"
    if not 0 <= augmentation.smoothing < 1:
        yield f"--augmentation.smoothing is {augmentation.smoothing}, allowed: from 0 to below 1"
    if not 0 < augmentation.centre_share <= 1:
        yield f"--augmentation.centre_share is {augmentation.centre_share}, allowed: more than 0, at most 1"
    if augmentation.operations < 1:
        yield f"--augmentation.operations is {augmentation.operations}, allowed: 1 or more"
    if crops.count != 1:
        yield f"--crops.count is {crops.count}, allowed for classification: 1"
    if (augmentation.mixup > 0 or augmentation.cutmix > 0) and micro_size % 2:
        yield (
            f"--batch.micro_size is {micro_size}, and mixup and cutmix mix neighbours, two by two; allowed: even "
            f"numbers, for example {micro_size + 1}, or --augmentation.mixup 0 --augmentation.cutmix 0"
        )
