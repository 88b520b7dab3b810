"""Checks of the settings of learned masks; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trp_scale.config import Config, MultilevelConfig, PretrainConfig, split_patches

AT_LEAST = {
    "unroll": 1,
    "every": 1,
    "batch_size": 0,
    "micro_size": 0,
    "gamma": 0,
    "proximity": 0,
    "look_ahead_lr": 0,
    "head_weight_decay": 0,
    "weight_decay": 0,
    "exact_every": 0,
}
ABOVE_ZERO = ("head_lr", "lr", "eps", "difference")

OF_MASKS = ("masking.hidden_size", "masking.weights", "masking.selection", "masking.temperature", "masking.final_ratio")
"""Settings of the masking network and of what it chooses."""
OF_LABELS = tuple(
    f"multilevel.{field.name}"
    for field in fields(MultilevelConfig)
    if field.name not in ("feedback", "unroll", "every", "lr", "weight_decay", "eps")
)
"""Settings that only feedback from a head reads."""


def multilevel_problems(config: PretrainConfig) -> Iterator[str]:
    """Settings of learned masks that no run can have."""
    yield from _numbers(config)
    masking = config.masking
    if masking.network == "none":
        return
    if config.upstream != "mae":
        yield (
            f"--masking.network is {masking.network} but --upstream is {config.upstream}; allowed: --masking.network "
            "none, or --upstream mae"
        )
        return
    if config.training.precision == "fp16":
        yield (
            f"--training.precision is fp16 but --masking.network is {masking.network}: its weights are half precision, "
            "and the small changes of them that masks are learned by are rounded away; allowed: bf16, fp32"
        )
    if masking.final_ratio:
        yield from _final_ratio(config)
    if config.multilevel.feedback == "downstream":
        yield from _levels(config)
        yield from _batches(config)


def _numbers(config: Config) -> Iterator[str]:
    multilevel, masking = config.multilevel, config.masking
    for name, limit in AT_LEAST.items():
        if not limit <= (value := getattr(multilevel, name)) < float("inf"):
            yield f"--multilevel.{name} is {value}, allowed: {limit} or more"
    for name in ABOVE_ZERO:
        if not 0 < (value := getattr(multilevel, name)) < float("inf"):
            yield f"--multilevel.{name} is {value}, allowed: more than 0"
    if not 0 < multilevel.validation_share < 1:
        yield f"--multilevel.validation_share is {multilevel.validation_share}, allowed: more than 0 and below 1"
    if not 0 <= multilevel.head_dropout < 1:
        yield f"--multilevel.head_dropout is {multilevel.head_dropout}, allowed: from 0 to below 1"
    if masking.hidden_size < 1:
        yield f"--masking.hidden_size is {masking.hidden_size}, allowed: 1 or more"
    if not 0 < masking.temperature < float("inf"):
        yield f"--masking.temperature is {masking.temperature}, allowed: more than 0"


def _final_ratio(config: Config) -> Iterator[str]:
    masking, vision, crops = config.masking, config.vision, config.crops
    if not masking.ratio < masking.final_ratio < 1:
        yield (
            f"--masking.final_ratio is {masking.final_ratio}, allowed: 0 (the ratio stays), or more than "
            f"--masking.ratio {masking.ratio} and below 1"
        )
        return
    if vision.patch_size < 1 or crops.size < 1 or crops.size % vision.patch_size:
        return  # refused as such
    split = split_patches(crops.size, vision.patch_size, masking.final_ratio)
    if split.visible < 1:
        yield (
            f"--masking.final_ratio {masking.final_ratio} leaves none of {split.patches} patches visible at the end; "
            f"allowed: at most {1 - 1 / split.patches:.6g}"
        )


def _levels(config: Config) -> Iterator[str]:
    multilevel, selection = config.multilevel, config.masking.selection
    if selection != "hard" and config.objective.uniformity:
        yield (
            f"--masking.selection is {selection} but --objective.uniformity is {config.objective.uniformity:g}, whose "
            "derivative by the choice of patches is not known; allowed: --masking.selection hard, or "
            "--objective.uniformity 0"
        )
    yield from _second_level(config)
    if multilevel.mode == "look_ahead" and multilevel.second_level != "head":
        yield (
            f"--multilevel.second_level is {multilevel.second_level} but --multilevel.mode is look_ahead; allowed: "
            "--multilevel.second_level head, or --multilevel.mode committed"
        )
    if multilevel.mode == "look_ahead":
        yield from _ahead(config)
    if multilevel.derivative != "full":
        return
    if multilevel.mode != "look_ahead":
        yield (
            f"--multilevel.derivative is full but --multilevel.mode is {multilevel.mode}; allowed: "
            "--multilevel.derivative last, or --multilevel.mode look_ahead"
        )
    if selection != "hard":
        yield (
            f"--multilevel.derivative is full but --masking.selection is {selection}; allowed: --multilevel.derivative "
            "last, or --masking.selection hard"
        )


def _second_level(config: Config) -> Iterator[str]:
    """What the two other second levels need."""
    level, proximity, lr = config.multilevel.second_level, config.multilevel.proximity, config.optimizer.lr
    if level == "joint" and config.balancer.kind != "uniform":
        yield (
            f"--balancer.kind is {config.balancer.kind} but --multilevel.second_level joint has no tasks to balance: "
            "--multilevel.gamma weighs its two; allowed: --balancer.kind uniform"
        )
    if level == "fine_tuning" and not 0.0 < 2.0 * lr * proximity < 1.0:
        yield (
            f"--multilevel.proximity is {proximity:g} and --optimizer.lr {lr:g}: a step would take the second encoder "
            f"{2.0 * lr * proximity:g} of the way to the first; allowed: more than 0 and below 1, a proximity below "
            f"{0.5 / lr:g}"
        )


def _ahead(config: Config) -> Iterator[str]:
    """What other hooks only find out in the step itself is not known to steps that are made before it."""
    if config.adversary.kind == "pixels":
        yield (
            "--multilevel.mode is look_ahead but --adversary.kind is pixels, whose shifts of the next images are not "
            "known yet; allowed: --multilevel.mode committed, or an adversary on positions"
        )
    if config.balancer.kind == "minimax" and config.balancer.estimate == "micro":
        yield (
            "--multilevel.mode is look_ahead but --balancer.estimate is micro, whose weights differ between "
            "micro-batches; allowed: --multilevel.mode committed, or --balancer.estimate exact or lagged"
        )
    if config.objective.uniformity:
        yield (
            f"--multilevel.mode is look_ahead but --objective.uniformity is {config.objective.uniformity:g}, which "
            "needs a pass over the whole batch first; allowed: --multilevel.mode committed, or --objective.uniformity 0"
        )


def _batches(config: Config) -> Iterator[str]:
    multilevel, batch = config.multilevel, config.batch
    if not (multilevel.batch_size or multilevel.micro_size):
        return  # those of the weights, which are checked
    size, micro = multilevel.batch_size or batch.global_size, multilevel.micro_size or batch.micro_size
    if size > 0 and micro > 0 and size % micro:
        allowed = [one for one in range(1, size + 1) if size % one == 0]
        near = sorted(sorted(allowed, key=lambda one: abs(one - micro))[:4])
        names = {
            "--multilevel.micro_size": "" if multilevel.micro_size else " (that of --batch.micro_size)",
            "--multilevel.batch_size": "" if multilevel.batch_size else " (that of --batch.global_size)",
        }
        (micro_flag, micro_from), (size_flag, size_from) = names.items()
        yield (
            f"{micro_flag} is {micro}{micro_from} and does not divide {size_flag} {size}{size_from}; allowed, for "
            f"example: {', '.join(map(str, near))}"
        )


def multilevel_cautions(config: Config) -> Iterator[str]:
    """What is allowed but rarely meant; settings that are not read are in `unread_masks`."""
    masking, multilevel = config.masking, config.multilevel
    if masking.network == "none":
        return
    if multilevel.feedback == "reconstruction" and masking.weights == "raw" and masking.selection == "hard":
        yield (
            "--multilevel.feedback reconstruction with --masking.weights raw and --masking.selection hard only ever "
            "raises probabilities: a larger weight is a larger loss, whatever the patch; --masking.weights normalised "
            "compares patches with each other"
        )
    if config.training.compile and masking.final_ratio:
        yield (
            f"--training.compile with --masking.final_ratio {masking.final_ratio:g}: the model is compiled anew for "
            "each number of visible patches that the ratio passes through"
        )


def unread_masks(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings, or whole sections, that this run does not read, and because of what."""
    masking, multilevel = config.masking, config.multilevel
    if masking.network == "none":
        yield ("multilevel", *OF_MASKS), "--masking.network none"
        return
    if masking.selection != "softsort":
        yield ("masking.temperature",), f"--masking.selection {masking.selection}"
    if multilevel.feedback == "reconstruction":
        yield OF_LABELS, "--multilevel.feedback reconstruction"
        return
    if multilevel.second_level != "joint":
        yield ("multilevel.gamma",), f"--multilevel.second_level {multilevel.second_level}"
    if multilevel.second_level != "fine_tuning":
        yield ("multilevel.proximity",), f"--multilevel.second_level {multilevel.second_level}"
    if multilevel.mode != "look_ahead":
        yield ("multilevel.look_ahead_lr",), f"--multilevel.mode {multilevel.mode}"
    elif multilevel.unroll == 1:
        yield ("multilevel.derivative",), "--multilevel.unroll 1"
