"""Checks of the balancer's settings: ranges, and settings that a kind never reads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from trp_scale.config import BalancerConfig, Config, RefusedError
from trp_scale.recipes.balancer_checks import READ_BY, balancer_cautions
from trp_scale.recipes.checks import cautions, check


def config(**balancer: Any) -> Config:
    made = Config(balancer=BalancerConfig(**balancer))
    made.data.path = "data"
    return made


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scale": "reference"}, "--balancer.reference is empty"),
        ({"alpha": -1.0}, "--balancer.alpha is -1.0, allowed: 0 or more"),
        ({"min_count": -1}, "--balancer.min_count is -1, allowed: 0 or more"),
        ({"loss_ema": 1.0}, "--balancer.loss_ema is 1.0, allowed: from 0 to below 1"),
        ({"bound": 0.0}, "--balancer.bound is 0.0, allowed: more than 0"),
        ({"group_dro_rate": 0.0}, "--balancer.group_dro_rate is 0.0, allowed: more than 0"),
        ({"group_dro_adjustment": -0.1}, "--balancer.group_dro_adjustment is -0.1, allowed: 0 or more"),
        ({"uncertainty_lr": float("nan")}, "--balancer.uncertainty_lr is nan, allowed: more than 0"),
        ({"gradnorm_lr": float("inf")}, "--balancer.gradnorm_lr is inf, allowed: more than 0"),
        ({"gradnorm_alpha": -1.5}, "--balancer.gradnorm_alpha is -1.5, allowed: 0 or more"),
        ({"dwa_temperature": 0.0}, "--balancer.dwa_temperature is 0.0, allowed: more than 0"),
        ({"dwa_interval_steps": -1}, "--balancer.dwa_interval_steps is -1, allowed: 0 or more"),
    ],
)
def test_a_setting_that_no_run_can_have_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check(config(**settings))
    assert expected in str(caught.value)
    assert "1 setting(s)" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"estimate": "micro"}, "a wrong estimate"),
        ({"kind": "group_dro", "estimate": "micro"}, "a wrong estimate"),
        ({"reference": {"verb": 1.0}}, "--balancer.scale is none: it has no effect"),
        (
            {"kind": "uniform", "estimate": "lagged"},
            "--balancer.estimate lagged has no effect with --balancer.kind unif",
        ),
        ({"kind": "dwa", "estimate": "micro"}, "--balancer.estimate micro has no effect with --balancer.kind dwa"),
        ({"kind": "gradnorm", "loss_ema": 0.5}, "--balancer.loss_ema 0.5 has no effect with --balancer.kind gradnorm"),
        (
            {"kind": "proportional", "scale": "initial"},
            "--balancer.scale initial has no effect with --balancer.kind pro",
        ),
        ({"kind": "dwa", "scale": "initial"}, "--balancer.scale initial has no effect with --balancer.kind dwa"),
        ({"kind": "gradnorm", "scale": "initial"}, "--balancer.scale initial has no effect with --balancer.kind gradn"),
        (
            {"kind": "uncertainty", "scale": "reference", "reference": {"verb": 1.0}},
            "a loss at its reference or below counts as 0.001 above it",
        ),
        (
            {"kind": "uniform", "uniform_form": "sum"},
            "--balancer.uniform_form sum has no effect with --balancer.total 1",
        ),
        ({"kind": "minimax", "total": "paper"}, "--balancer.total paper has no effect with --balancer.kind minimax"),
        ({"kind": "uniform", "alpha": 4.0}, "--balancer.alpha 4.0 has no effect with --balancer.kind uniform"),
        ({"kind": "dwa", "dwa_interval_steps": 500_000}, "leaves no third interval in --training.steps 1000000"),
    ],
)
def test_what_has_no_effect_or_is_rarely_meant_is_allowed_with_a_caution(
    settings: dict[str, Any], expected: str
) -> None:
    check(config(**settings))
    (caution,) = cautions(config(**settings))
    assert expected in caution


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "group_dro", "estimate": "lagged", "loss_ema": 0.9, "min_count": 4, "scale": "initial"},
        {"kind": "uncertainty", "scale": "initial", "uncertainty_form": "kendall"},
        {"kind": "gradnorm", "total": "paper", "gradnorm_at": "representation"},
        {"kind": "dwa", "total": "paper", "dwa_interval_steps": 1000},
        {"kind": "uniform", "total": "paper", "uniform_form": "sum"},
    ],
    ids=lambda settings: settings["kind"],
)
def test_what_a_kind_reads_gives_no_caution(settings: dict[str, Any]) -> None:
    check(config(**settings))
    assert cautions(config(**settings)) == []


def test_an_epoch_as_dwa_s_interval_is_cautioned_against_where_the_run_is_too_short_for_three() -> None:
    settings = config(kind="dwa")
    (caution,) = cautions(settings, steps_per_epoch=500_000)
    assert "--balancer.dwa_interval_steps 0, an epoch of 500000 steps, leaves no third interval" in caution
    assert cautions(settings, steps_per_epoch=499_999) == cautions(settings) == []


def test_a_smoothing_that_the_estimate_micro_never_reads_is_cautioned_against() -> None:
    def smoothed(**settings: Any) -> list[str]:
        return [text for text in balancer_cautions(config(loss_ema=0.9, **settings)) if "loss_ema" in text]

    (caution,) = smoothed(estimate="micro")
    assert "--balancer.loss_ema 0.9 has no effect with --balancer.estimate micro" in caution
    assert smoothed(estimate="exact") == smoothed(estimate="lagged") == []
    assert smoothed(kind="group_dro", estimate="micro") == []  # its shares still move by smoothed losses


def test_it_is_known_of_every_setting_which_kinds_read_it() -> None:
    settings = {field.name for field in fields(BalancerConfig)}
    assert set(READ_BY) == settings - {"kind", "reference"}  # a reference is read where scale says so
