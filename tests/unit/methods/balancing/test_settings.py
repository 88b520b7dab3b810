"""Checks of the balancer's settings: ranges, and settings that a kind does not have."""

from __future__ import annotations

from typing import Any

import pytest

from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import cautions, check
from trp_scale.config.registry import make_settings
from trp_scale.config.run_flags import parse
from trp_scale.pretraining.pos_bert.settings import PosBertConfig


def config(kind: str = "minimax", **balancer: Any) -> Config:
    made = PosBertConfig(balancer=make_settings("balancer", kind, **balancer))
    made.data.path, made.batch.micro_size = "data", 32
    return made


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scale": "reference"}, "--balancer.reference_file"),
        ({"alpha": float("inf")}, "--balancer.alpha is inf"),
        ({"loss_ema": 1.0}, "--balancer.loss_ema is 1.0"),
        ({"kind": "group_dro", "rate": 0.0}, "--balancer.rate is 0.0"),
        ({"kind": "uncertainty", "lr": float("nan")}, "--balancer.lr is nan"),
        ({"kind": "dwa", "interval_steps": -1}, "--balancer.interval_steps is -1"),
        ({"kind": "stch", "preference": {"verb": 0.0}}, "--balancer.preference verb is 0"),
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
        ({"estimate": "micro"}, "--balancer.estimate micro"),
        ({"kind": "group_dro", "estimate": "micro"}, "--balancer.estimate micro"),
        ({"reference": {"verb": 1.0}}, "--balancer.scale is none: it has no effect"),
        ({"kind": "dwa", "scale": "initial"}, "--balancer.scale initial has no effect with --balancer.kind dwa"),
        ({"kind": "famo", "scale": "initial"}, "--balancer.scale initial has no effect with --balancer.kind famo"),
        ({"kind": "gradnorm", "scale": "initial"}, "--balancer.scale initial has no effect with --balancer.kind gradn"),
        (
            {"kind": "uncertainty", "scale": "reference", "reference": {"verb": 1.0}},
            "--balancer.scale reference with --balancer.kind uncertainty",
        ),
        (
            {"kind": "uniform", "form": "sum"},
            "--balancer.form sum has no effect with --balancer.total 1",
        ),
        ({"kind": "dwa", "interval_steps": 500_000}, "leaves no third interval in --training.steps 1000000"),
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
        {"kind": "uncertainty", "scale": "initial", "form": "kendall"},
        {"kind": "gradnorm", "total": "paper", "at": "representation"},
        {"kind": "dwa", "total": "paper", "interval_steps": 1000},
        {"kind": "uniform", "total": "paper", "form": "sum"},
    ],
    ids=lambda settings: settings["kind"],
)
def test_what_a_kind_reads_gives_no_caution(settings: dict[str, Any]) -> None:
    check(config(**settings))
    assert cautions(config(**settings)) == []


def test_an_epoch_as_dwa_s_interval_is_cautioned_against_where_the_run_is_too_short_for_three() -> None:
    settings = config(kind="dwa")
    (caution,) = cautions(settings, steps_per_epoch=500_000)
    assert "--balancer.interval_steps 0, an epoch of 500000 steps, leaves no third interval" in caution
    assert cautions(settings, steps_per_epoch=499_999) == cautions(settings) == []


def test_a_smoothing_that_the_estimate_micro_never_reads_is_cautioned_against() -> None:
    def smoothed(**settings: Any) -> list[str]:
        return [text for text in cautions(config(loss_ema=0.9, **settings)) if "loss_ema" in text]

    (caution,) = smoothed(estimate="micro")
    assert "--balancer.loss_ema 0.9 has no effect with --balancer.estimate micro" in caution
    assert smoothed(estimate="exact") == smoothed(estimate="lagged") == []
    assert smoothed(kind="group_dro", estimate="micro") == []  # its shares still move by smoothed losses


def test_another_kind_keeps_what_both_have_from_one_class_and_starts_from_its_own_defaults() -> None:
    def parsed(*flags: str) -> Any:
        return parse(["--recipe", "pos_bert_tiny", *flags]).config.balancer

    recipe = parsed()
    assert (recipe.kind, recipe.min_count, recipe.alpha) == ("minimax", 8, 1.0)
    assert parsed("--balancer.kind", "group_dro").min_count == 8
    assert parsed("--balancer.kind", "gradnorm").alpha == 1.5, "another alpha of the same name"
