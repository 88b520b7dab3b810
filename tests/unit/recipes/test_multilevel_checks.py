"""Checks of the settings of learned masks: ranges, what does not go together, and what is never read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tests.settings import changed
from trp_scale.config import Config, MultilevelConfig, RefusedError, split_patches
from trp_scale.recipes.checks import cautions, check
from trp_scale.recipes.loader import from_dict, load_recipe, to_dict
from trp_scale.recipes.multilevel_checks import ABOVE_ZERO, AT_LEAST, unread_masks


def config(recipe: str = "mae_vit_b", **changes: Any) -> Config:
    """MAE ViT-B with a masking network and `section__field=value` changes: 196 patches, batches of 4096 in 64s."""
    document = to_dict(load_recipe(recipe))
    document["data"]["path"] = "data"
    given: dict[str, dict[str, Any]] = {}
    for name, value in ({"masking__network": "flattened"} | changes).items():
        section, field = name.split("__")
        given.setdefault(section, {})[field] = value
    return changed(from_dict(document), **given)


def problem(**changes: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        check(config(**changes))
    assert "1 setting(s)" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("network", ["flattened", "patchwise", "none"])
def test_the_defaults_pass_and_give_no_caution(network: str) -> None:
    made = config(masking__network=network)
    check(made)
    assert cautions(made) == []


@pytest.mark.parametrize("network", ["flattened", "none"])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("multilevel__unroll", 0, "1 or more"),
        ("multilevel__every", 0, "1 or more"),
        ("multilevel__batch_size", -1, "0 or more"),
        ("multilevel__micro_size", -1, "0 or more"),
        ("multilevel__gamma", -0.1, "0 or more"),
        ("multilevel__proximity", float("inf"), "0 or more"),
        ("multilevel__look_ahead_lr", -1.0, "0 or more"),
        ("multilevel__head_weight_decay", -1.0, "0 or more"),
        ("multilevel__weight_decay", float("nan"), "0 or more"),
        ("multilevel__exact_every", -1, "0 or more"),
        ("multilevel__head_lr", 0.0, "more than 0"),
        ("multilevel__lr", 0.0, "more than 0"),
        ("multilevel__eps", 0.0, "more than 0"),
        ("multilevel__difference", 0.0, "more than 0"),
        ("multilevel__validation_share", 0.0, "more than 0 and below 1"),
        ("multilevel__validation_share", 1.0, "more than 0 and below 1"),
        ("multilevel__head_dropout", 1.0, "from 0 to below 1"),
        ("masking__hidden_size", 0, "1 or more"),
        ("masking__temperature", 0.0, "more than 0"),
        ("objective__uniformity", -0.01, "0 or more"),
    ],
)
def test_ranges(network: str, name: str, value: float, allowed: str) -> None:
    flag = name.replace("__", ".")
    assert f"--{flag} is {value}, allowed: {allowed}" in problem(**{name: value}, masking__network=network)


def test_every_number_has_a_range() -> None:
    numbers = {field.name for field in fields(MultilevelConfig) if field.type in ("int", "float")}
    assert numbers == {*AT_LEAST, *ABOVE_ZERO, "validation_share", "head_dropout"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"multilevel__second_level": "joint", "multilevel__mode": "look_ahead"},
            "--multilevel.second_level is joint but --multilevel.mode is look_ahead; allowed: --multilevel.second_level"
            " head, or --multilevel.mode committed",
        ),
        (
            {"multilevel__second_level": "fine_tuning", "multilevel__mode": "look_ahead"},
            "--multilevel.second_level is fine_tuning but --multilevel.mode is look_ahead",
        ),
        ({"multilevel__derivative": "full"}, "allowed: --multilevel.derivative last, or --multilevel.mode look_ahead"),
        (
            {
                "multilevel__mode": "look_ahead",
                "adversary__kind": "pixels",
                "adversary__eps": 0.1,
            },
            "--adversary.kind is pixels, whose shifts of the next images are not known",
        ),
        (
            {"multilevel__second_level": "joint", "balancer__kind": "minimax"},
            "--balancer.kind is minimax but --multilevel.second_level joint has no tasks to balance",
        ),
        (
            {"multilevel__second_level": "fine_tuning", "multilevel__proximity": 0.0},
            "--multilevel.proximity is 0 and --optimizer.lr 0.0024",
        ),
        (
            {"multilevel__second_level": "fine_tuning", "multilevel__proximity": 210.0},
            "a proximity below 208.333",
        ),
        (
            {"multilevel__mode": "look_ahead", "balancer__kind": "minimax", "balancer__estimate": "micro"},
            "--multilevel.mode is look_ahead but --balancer.estimate is micro",
        ),
        (
            {"masking__selection": "softsort", "objective__uniformity": 0.01},
            "--masking.selection is softsort but --objective.uniformity is 0.01",
        ),
        (
            {"multilevel__mode": "look_ahead", "objective__uniformity": 0.01},
            "--objective.uniformity is 0.01, which needs a pass over the whole batch first",
        ),
        (
            {
                "multilevel__derivative": "full",
                "multilevel__mode": "look_ahead",
                "masking__selection": "straight_through",
            },
            "--masking.selection is straight_through; allowed: --multilevel.derivative last, or --masking.selection "
            "hard",
        ),
        (
            {"multilevel__derivative": "full", "multilevel__mode": "look_ahead", "masking__selection": "softsort"},
            "--masking.selection is softsort",
        ),
        ({"training__precision": "fp16"}, "--training.precision is fp16 but --masking.network is flattened"),
        ({"masking__final_ratio": 0.75}, "--masking.final_ratio is 0.75, allowed: 0 (the ratio stays), or more than"),
        ({"masking__final_ratio": 1.0}, "and below 1"),
        ({"masking__final_ratio": -0.5}, "--masking.final_ratio is -0.5"),
        ({"masking__final_ratio": float("nan")}, "--masking.final_ratio is nan"),
        ({"masking__final_ratio": 0.995}, "leaves none of 196 patches visible at the end; allowed: at most 0.994898"),
        (
            {"multilevel__micro_size": 60},
            "--multilevel.micro_size is 60 and does not divide --multilevel.batch_size 4096 (that of "
            "--batch.global_size); allowed, for example: 8, 16, 32, 64",
        ),
        (
            {"multilevel__batch_size": 96},
            "--multilevel.micro_size is 64 (that of --batch.micro_size) and does not divide --multilevel.batch_size 96",
        ),
    ],
)
def test_what_no_run_can_have_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in problem(**changes)


@pytest.mark.parametrize("recipe", ["pos_bert_tiny", "mm_mae_tiny"])
def test_masks_are_learned_for_masked_autoencoders_of_images_alone(recipe: str) -> None:
    document = to_dict(load_recipe(recipe))
    document["data"]["path"] = "data"
    document["masking"]["network"] = "patchwise"
    with pytest.raises(RefusedError, match=r"1 setting.*\n.*allowed: --masking\.network none, or --upstream mae"):
        check(from_dict(document))


@pytest.mark.parametrize(
    "changes",
    [
        {"multilevel__second_level": "joint", "multilevel__gamma": 0.0},
        {"multilevel__second_level": "fine_tuning", "multilevel__proximity": 0.5},
        {"multilevel__mode": "look_ahead", "multilevel__derivative": "full", "multilevel__look_ahead_lr": 0.1},
        {"multilevel__mode": "look_ahead", "masking__selection": "softsort", "masking__temperature": 1.0},
        {"masking__selection": "straight_through"},
        {"masking__ratio": 0.5, "masking__final_ratio": 0.9},
        {"masking__final_ratio": 0.994},
        {"multilevel__batch_size": 128, "multilevel__micro_size": 32},
        {"multilevel__batch_size": 128},
        {"multilevel__micro_size": 128},
        {"objective__uniformity": 0.01},
        {"objective__uniformity": 0.01, "masking__network": "none"},
        {"multilevel__feedback": "reconstruction", "masking__weights": "normalised"},
        {"multilevel__feedback": "reconstruction", "masking__selection": "straight_through"},
        {"masking__maskings": 3},
        {"training__precision": "bf16", "training__compile": True, "multilevel__exact_every": 5},
    ],
)
def test_what_goes_together_gives_no_caution(changes: dict[str, Any]) -> None:
    made = config(**changes)
    check(made)
    assert cautions(made) == []


def test_the_largest_final_ratio_that_is_named_leaves_a_patch() -> None:
    assert "at most 0.994898" in problem(masking__final_ratio=0.9949)
    assert split_patches(224, 16, 0.994897).visible == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"multilevel__feedback": "reconstruction"}, "--masking.weights normalised compares patches"),
        ({"training__compile": True, "masking__final_ratio": 0.9}, "compiled anew for each number of visible patches"),
        (
            {"masking__network": "none", "multilevel__unroll": 5},
            "--multilevel.unroll 5 has no effect with --masking.ne",
        ),
        ({"masking__network": "none", "masking__final_ratio": 0.9}, "--masking.final_ratio 0.9 has no effect"),
        ({"masking__network": "none", "masking__weights": "normalised"}, "--masking.weights normalised has no effect"),
        ({"masking__temperature": 1.0}, "--masking.temperature 1.0 has no effect with --masking.selection hard"),
        ({"multilevel__gamma": 2.0}, "--multilevel.gamma 2.0 has no effect with --multilevel.second_level head"),
        (
            {"multilevel__proximity": 2.0, "multilevel__second_level": "joint"},
            "--multilevel.proximity 2.0 has no effect with --multilevel.second_level joint",
        ),
        ({"multilevel__look_ahead_lr": 1.0}, "--multilevel.look_ahead_lr 1.0 has no effect with --multilevel.mode com"),
        (
            {"multilevel__mode": "look_ahead", "multilevel__derivative": "full", "multilevel__unroll": 1},
            "--multilevel.derivative full has no effect with --multilevel.unroll 1",
        ),
        *(
            (
                {
                    "multilevel__feedback": "reconstruction",
                    "masking__weights": "normalised",
                    f"multilevel__{name}": value,
                },
                f"--multilevel.{name} {value} has no effect with --multilevel.feedback reconstruction",
            )
            for name, value in (
                ("second_level", "joint"),
                ("mode", "look_ahead"),
                ("derivative", "full"),
                ("unlabelled", "all"),
                ("validation_share", 0.5),
                ("batch_size", 7),
                ("head_lr", 1.0),
                ("head_norm", "layer"),
                ("pooling", "class"),
                ("difference", 0.5),
            )
        ),
    ],
)
def test_what_has_no_effect_or_is_rarely_meant_is_allowed_with_a_caution(
    changes: dict[str, Any], expected: str
) -> None:
    made = config(**changes)
    check(made)
    (caution,) = cautions(made)
    assert expected in caution


def test_all_that_only_labels_need_is_listed() -> None:
    made = config(multilevel__feedback="reconstruction", masking__selection="softsort")
    ((names, _),) = unread_masks(made)
    read = {"feedback", "unroll", "every", "lr", "weight_decay", "eps"}
    assert {name.partition(".")[2] for name in names} == {field.name for field in fields(MultilevelConfig)} - read
