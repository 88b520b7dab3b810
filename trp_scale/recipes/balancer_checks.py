"""Checks of the balancer's settings; every message names the flag to change."""

from __future__ import annotations

from collections.abc import Iterator

from trp_scale.config import BalancerConfig, Config

AT_LEAST_ZERO = ("alpha", "min_count", "group_dro_adjustment", "gradnorm_alpha", "dwa_interval_steps")
ABOVE_ZERO = ("radius", "lipschitz", "bound", "group_dro_rate", "uncertainty_lr", "gradnorm_lr", "dwa_temperature")
BELOW_ONE = ("loss_ema",)

OF_GLOBAL_LOSSES = ("minimax", "group_dro")
"""Kinds that weigh a batch by its own losses."""
OF_WHAT_IS_LEFT = ("uncertainty", "gradnorm", "dwa")
"""Kinds that divide by losses or take their logarithm."""
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("alpha", "alpha_schedule", "radius", "lipschitz", "bound"), ("minimax",)),
    **dict.fromkeys(("estimate", "loss_ema", "min_count"), OF_GLOBAL_LOSSES),
    "scale": (*OF_GLOBAL_LOSSES, *OF_WHAT_IS_LEFT),
    "total": ("uniform", "gradnorm", "dwa"),
    "uniform_form": ("uniform",),
    **dict.fromkeys(("group_dro_rate", "group_dro_adjustment"), ("group_dro",)),
    **dict.fromkeys(("uncertainty_form", "uncertainty_lr"), ("uncertainty",)),
    **dict.fromkeys(("gradnorm_at", "gradnorm_alpha", "gradnorm_lr"), ("gradnorm",)),
    **dict.fromkeys(("dwa_temperature", "dwa_interval_steps"), ("dwa",)),
}
"""Kinds that each setting has an effect on."""


def balancer_problems(config: Config) -> Iterator[str]:
    """Balancer settings that no run can have."""
    balancer = config.balancer
    for name in AT_LEAST_ZERO:
        if not 0 <= (value := getattr(balancer, name)) < float("inf"):
            yield f"--balancer.{name} is {value}, allowed: 0 or more"
    for name in ABOVE_ZERO:
        if not 0 < (value := getattr(balancer, name)) < float("inf"):
            yield f"--balancer.{name} is {value}, allowed: more than 0"
    for name in BELOW_ONE:
        if not 0 <= (value := getattr(balancer, name)) < 1:
            yield f"--balancer.{name} is {value}, allowed: from 0 to below 1"
    if balancer.scale == "reference" and not balancer.reference:
        yield "--balancer.scale is reference but --balancer.reference is empty; allowed, for example: verb 2.1 noun 3"


def balancer_cautions(config: Config, steps_per_epoch: int = 0) -> Iterator[str]:
    """What is allowed but rarely meant.

    Args:
        steps_per_epoch: global batches that the training rows make; 0 = not known yet.
    """
    balancer, default = config.balancer, BalancerConfig()
    for name, kinds in READ_BY.items():
        value = getattr(balancer, name)
        if value != getattr(default, name) and balancer.kind not in kinds:
            yield f"--balancer.{name} {value} has no effect with --balancer.kind {balancer.kind}"
    if balancer.reference and balancer.scale != "reference":
        yield f"--balancer.reference is given but --balancer.scale is {balancer.scale}: it has no effect"
    if balancer.kind in OF_GLOBAL_LOSSES and balancer.estimate == "micro":
        yield from _micro(balancer)
    if balancer.kind == "uniform" and balancer.uniform_form == "sum" and balancer.total == "1":
        yield "--balancer.uniform_form sum has no effect with --balancer.total 1; --balancer.total paper keeps the sum"
    if balancer.kind in OF_WHAT_IS_LEFT:
        yield from _scales(balancer)
    interval = balancer.dwa_interval_steps or steps_per_epoch
    if balancer.kind == "dwa" and interval and 2 * interval >= config.training.steps:
        of_epoch = "" if balancer.dwa_interval_steps else f", an epoch of {interval} steps,"
        yield (
            f"--balancer.dwa_interval_steps {balancer.dwa_interval_steps}{of_epoch} leaves no third interval in "
            f"--training.steps {config.training.steps}: all weights stay equal"
        )


def _micro(balancer: BalancerConfig) -> Iterator[str]:
    yield (
        "--balancer.estimate micro weighs each micro-batch by its own losses alone: a wrong estimate of the method, "
        "kept as a baseline; exact and lagged use the losses of the global batch"
    )
    if balancer.kind == "minimax" and balancer.loss_ema > 0:
        yield (
            f"--balancer.loss_ema {balancer.loss_ema:g} has no effect with --balancer.estimate micro, which takes each "
            "micro-batch's losses as they are; exact and lagged smooth them"
        )


def _scales(balancer: BalancerConfig) -> Iterator[str]:
    if balancer.scale == "initial" and balancer.kind != "uncertainty":
        yield (
            f"--balancer.scale initial has no effect with --balancer.kind {balancer.kind}, which reads only how many "
            "times smaller a loss has become"
        )
    if balancer.scale == "reference":
        yield (
            f"--balancer.scale reference with --balancer.kind {balancer.kind}: a loss at its reference or below counts "
            "as 0.001 above it, and its weight follows that floor from there on"
        )
