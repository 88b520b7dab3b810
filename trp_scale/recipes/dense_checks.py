"""Checks of the settings of segmentation and depth; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config.finetuning import FinetuneConfig

MOST_SCALE = 10.0
"""Largest scale of a jitter: a hundredth of the image fills the crop."""

WIDTH_UNIT = 8
"""Heads have 3/8 and half as many channels in places."""

LEVELS = 4


def dense_problems(config: FinetuneConfig) -> Iterator[str]:
    """Settings that neither segmentation nor depth can have."""
    dense, kind = config.dense, config.downstream.kind
    if not 0 < dense.min_scale <= dense.max_scale <= MOST_SCALE:
        yield (
            f"--dense.min_scale is {dense.min_scale} and --dense.max_scale {dense.max_scale}, allowed: more than 0, at "
            f"most {MOST_SCALE:g}, the first not above the second"
        )
    if not 0 <= dense.overlap <= 0.9:
        yield f"--dense.overlap is {dense.overlap}, allowed: from 0 to 0.9"
    if dense.width < 0 or dense.width % WIDTH_UNIT:
        yield f"--dense.width is {dense.width}, allowed: 0 (the head's own) or multiples of {WIDTH_UNIT}"
    if dense.auxiliary_weight < 0 or (dense.auxiliary_weight and dense.head != "upernet"):
        allowed = "0 or more" if dense.head == "upernet" else f"0 with --dense.head {dense.head}, more with upernet"
        yield f"--dense.auxiliary_weight is {dense.auxiliary_weight}, allowed: {allowed}"
    if dense.head == "upernet" and config.crops.size < 2 * config.vision.patch_size:
        yield (
            f"--crops.size is {config.crops.size}, allowed with --dense.head upernet: two patches or more, "
            f"{2 * config.vision.patch_size} pixels, since it also reads a map of half the patches"
        )
    if dense.head == "dpt" and kind == "segmentation":
        yield "--dense.head is dpt, allowed for segmentation: linear, convnext, upernet"
    if dense.after and (
        len(dense.after) != LEVELS or dense.after != sorted(dense.after) or not _are_blocks(dense.after, config)
    ):
        yield (
            f"--dense.after is {' '.join(map(str, dense.after))}, allowed: {LEVELS} blocks in ascending order, "
            f"from 0 to {config.model.layers - 1}"
        )
    if kind == "depth":
        yield from _depth_problems(config)


def _are_blocks(numbers: list[int], config: FinetuneConfig) -> bool:
    return all(0 <= number < config.model.layers for number in numbers)


def _depth_problems(config: FinetuneConfig) -> Iterator[str]:
    dense = config.dense
    if dense.min_depth <= 0:
        yield f"--dense.min_depth is {dense.min_depth}, allowed: more than 0"
    if dense.max_depth and dense.max_depth <= dense.min_depth:
        yield (
            f"--dense.max_depth is {dense.max_depth}, allowed: more than --dense.min_depth {dense.min_depth}, or 0 for "
            "no limit"
        )
    if dense.depth_deviation < 0:
        yield f"--dense.depth_deviation is {dense.depth_deviation}, allowed: more than 0, or 0 for that of the data"
