"""Checks of the settings of detection; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config.finetuning import FinetuneConfig

AT_LEAST_ONE = (
    "width", "box_width", "rpn_convolutions", "train_proposals", "test_proposals", "rpn_samples", "box_samples",
    "detections", "max_objects",
)  # fmt: skip


def detection_problems(config: FinetuneConfig) -> Iterator[str]:
    """Settings that no detection can have."""
    detection, patch_size, blocks = config.detection, config.vision.patch_size, config.model.layers
    for name in AT_LEAST_ONE:
        if getattr(detection, name) < 1:
            yield f"--detection.{name} is {getattr(detection, name)}, allowed: 1 or more"
    for name in ("score_threshold", "suppression_threshold"):
        if not 0 <= getattr(detection, name) <= 1:
            yield f"--detection.{name} is {getattr(detection, name)}, allowed: from 0 to 1"
    if not 2 <= detection.mask_size <= 1024:
        yield f"--detection.mask_size is {detection.mask_size}, allowed: from 2 to 1024"
    if not 0 < detection.min_scale <= detection.max_scale <= 4:
        yield (
            f"--detection.min_scale is {detection.min_scale} and --detection.max_scale {detection.max_scale}, allowed: "
            "more than 0, at most 4, the first not above the second"
        )
    if patch_size < 4 or patch_size & (patch_size - 1):
        yield (
            f"the encoder's patches have {patch_size} pixels; allowed for detection: a power of two from 4, since the "
            "levels of the pyramid are halves and doubles of it"
        )
    elif config.crops.size % (4 * patch_size):
        near = max(1, config.crops.size // (4 * patch_size)) * 4 * patch_size
        yield (
            f"--crops.size is {config.crops.size}, allowed for detection: multiples of four patches, "
            f"{4 * patch_size} pixels, for example {near}"
        )
    if detection.pyramid == "fpn" and blocks % 4:
        yield f"--detection.pyramid fpn reads every fourth of the blocks, the encoder has {blocks}; allowed: simple"
