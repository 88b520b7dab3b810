"""The settings of learned masks: ranges, what does not go together, and what has no effect."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tests.settings import changed
from trp_scale.config import Config, RefusedError
from trp_scale.config.images import split_patches
from trp_scale.config.loader import cautions, check, from_dict, load_recipe, to_dict
from trp_scale.config.registry import find
from trp_scale.config.run_flags import parse


def config(**changes: Any) -> Config:
    """MAE ViT-B with masks from a head and `section__field=value` changes: 196 patches, batches of 4096 in 64s."""
    sections: dict[str, dict[str, Any]] = {"data": {"path": "data"}}
    hooks = changes.pop("hooks", [])
    for name, value in ({"multilevel__kind": "head"} | changes).items():
        section, _, field = name.partition("__")
        sections.setdefault(section, {})[field] = value
    return changed(from_dict(to_dict(load_recipe("mae_vit_b")) | {"hooks": hooks}), **sections)


def problem(**changes: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        check(config(**changes))
    assert "1 setting(s)" in str(caught.value)
    return str(caught.value)


KINDS = ("none", "color", "self_guided", "head", "joint", "fine_tuning", "reconstruction")


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_pass_and_give_no_caution(kind: str) -> None:
    made = config(multilevel__kind=kind, **({"multilevel__weights": "normalised"} if kind == "reconstruction" else {}))
    check(made)
    assert cautions(made) == []


def test_every_number_has_a_range() -> None:
    """But for a ratio, which is compared with that at the start."""
    for kind in KINDS:
        for field in fields(find("multilevel", kind).settings):
            if field.type in ("int", "float") and field.name != "final_ratio":
                assert field.metadata["range"] is not None, (kind, field.name)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"multilevel__derivative": "full"}, "allowed: --multilevel.derivative last, or --multilevel.mode look_ahead"),
        (
            {"multilevel__mode": "look_ahead", "adversary__kind": "pixels", "adversary__eps": 0.1},
            "--multilevel.mode is look_ahead but --adversary.kind is pixels",
        ),
        (
            {"multilevel__kind": "joint", "balancer__kind": "minimax"},
            "--balancer.kind is minimax but --multilevel.kind joint has no tasks to balance",
        ),
        (
            {"multilevel__kind": "joint", "hooks": ["gradient_noise_scale"], "batch__micro_size": 32},
            "--multilevel.kind joint has two kinds of micro-batches, but the hook gradient_noise_scale",
        ),
        ({"multilevel__kind": "color", "multilevel__fine_sigma": 1.5}, "--multilevel.fine_sigma is 1.5"),
        ({"multilevel__kind": "fine_tuning", "multilevel__proximity": 210.0}, "a proximity below 208.333"),
        (
            {
                "multilevel__mode": "look_ahead",
                "balancer__kind": "minimax",
                "balancer__estimate": "micro",
                "batch__micro_size": 64,
            },
            "--multilevel.mode is look_ahead but --balancer.estimate is micro",
        ),
        (
            {"multilevel__selection": "softsort", "objective__uniformity": 0.01},
            "--multilevel.selection is softsort but --objective.uniformity is 0.01",
        ),
        (
            {"multilevel__mode": "look_ahead", "objective__uniformity": 0.01},
            "--multilevel.mode is look_ahead but --objective.uniformity is 0.01",
        ),
        (
            {
                "multilevel__derivative": "full",
                "multilevel__mode": "look_ahead",
                "multilevel__selection": "straight_through",
            },
            "--multilevel.selection is straight_through; allowed: --multilevel.derivative last, or "
            "--multilevel.selection hard",
        ),
        (
            {"multilevel__derivative": "full", "multilevel__mode": "look_ahead", "multilevel__selection": "softsort"},
            "--multilevel.selection is softsort",
        ),
        ({"training__precision": "fp16"}, "--training.precision is fp16 but --multilevel.kind is head"),
        ({"multilevel__final_ratio": 0.75}, "--multilevel.final_ratio is 0.75, allowed: 0 "),
        ({"multilevel__final_ratio": 1.0}, "and below 1"),
        ({"multilevel__final_ratio": -0.5}, "--multilevel.final_ratio is -0.5"),
        ({"multilevel__final_ratio": float("nan")}, "--multilevel.final_ratio is nan"),
        (
            {"multilevel__micro_size": 60},
            "--multilevel.micro_size is 60 and does not divide --multilevel.batch_size 4096 (that of "
            "--batch.global_size); allowed, for example: 8, 16, 32, 64",
        ),
        (
            {"multilevel__batch_size": 96, "batch__micro_size": 64},
            "--multilevel.micro_size is 64 (that of --batch.micro_size) and does not divide --multilevel.batch_size 96",
        ),
    ],
)
def test_what_no_run_can_have_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in problem(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"multilevel__kind": "joint", "multilevel__gamma": 0.0},
        {"multilevel__kind": "fine_tuning", "multilevel__proximity": 0.5},
        {"multilevel__mode": "look_ahead", "multilevel__derivative": "full", "multilevel__look_ahead_lr": 0.1},
        {"multilevel__mode": "look_ahead", "multilevel__selection": "softsort", "multilevel__temperature": 1.0},
        {"multilevel__selection": "straight_through"},
        {"masking__ratio": 0.5, "multilevel__final_ratio": 0.9},
        {"multilevel__final_ratio": 0.994},
        {"multilevel__batch_size": 128, "multilevel__micro_size": 32},
        {"multilevel__batch_size": 128},
        {"multilevel__micro_size": 128},
        {"objective__uniformity": 0.01},
        {"objective__uniformity": 0.01, "multilevel__kind": "none"},
        {"multilevel__kind": "reconstruction", "multilevel__weights": "normalised"},
        {"multilevel__kind": "reconstruction", "multilevel__selection": "straight_through"},
        {"masking__maskings": 3},
        {"training__precision": "bf16", "training__compile": "whole", "multilevel__exact_every": 5},
    ],
)
def test_what_goes_together_gives_no_caution(changes: dict[str, Any]) -> None:
    made = config(**changes)
    check(made)
    assert cautions(made) == []


def test_the_largest_final_ratio_that_is_named_leaves_a_patch() -> None:
    assert "at most 0.994898" in problem(multilevel__final_ratio=0.9949)
    assert split_patches(224, 16, 0.994897).visible == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"multilevel__kind": "reconstruction"}, "use --multilevel.weights normalised"),
        (
            {"training__compile": "whole", "multilevel__final_ratio": 0.9},
            "--training.compile with --multilevel.final_ratio 0.9",
        ),
        (
            {"multilevel__temperature": 1.0},
            "--multilevel.temperature 1.0 has no effect with --multilevel.selection hard",
        ),
        ({"multilevel__look_ahead_lr": 1.0}, "--multilevel.look_ahead_lr 1.0 has no effect with --multilevel.mode com"),
        (
            {"multilevel__mode": "look_ahead", "multilevel__derivative": "full", "multilevel__unroll": 1},
            "--multilevel.derivative full has no effect with --multilevel.unroll 1",
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


@pytest.mark.parametrize(
    ("kind", "name", "value", "having"),
    [
        ("none", "unroll", 5, "head, joint, fine_tuning, reconstruction"),
        ("head", "gamma", 2.0, "joint"),
        ("joint", "proximity", 2.0, "fine_tuning"),
        ("fine_tuning", "mode", "look_ahead", "head"),
        ("reconstruction", "batch_size", 7, "head, joint, fine_tuning"),
    ],
)
def test_a_setting_of_another_kind_is_refused_with_the_kinds_that_have_it(
    kind: str, name: str, value: Any, having: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        config(multilevel__kind=kind, **{f"multilevel__{name}": value})
    words = f"multilevel.{name}: a setting of kind {having}; this run's multilevel.kind is {kind}"
    assert words in str(caught.value)


def test_what_a_network_without_labels_reads_is_all_that_it_has() -> None:
    network = {"network", "hidden_size", "weights", "selection", "temperature", "final_ratio"}
    names = {field.name for field in fields(find("multilevel", "reconstruction").settings)}
    assert names == {"kind", "unroll", "every", "lr", "weight_decay", "eps"} | network


def test_another_kind_on_the_command_line_keeps_what_both_have() -> None:
    def parsed(*flags: str) -> Any:
        return parse(["--recipe", "mlo_mae_tiny", "--data.path", "data", *flags]).config.multilevel

    recipe, joint = parsed(), parsed("--multilevel.kind", "joint", "--multilevel.gamma", "2")
    assert (joint.kind, joint.gamma) == ("joint", 2.0)
    for name in ("hidden_size", "head_norm", "head_lr", "lr", "pooling"):
        assert getattr(joint, name) == getattr(recipe, name), name
    network = parsed("--multilevel.kind", "reconstruction", "--multilevel.weights", "normalised")
    assert (network.lr, network.hidden_size) == (recipe.lr, 128)
    assert parsed("--multilevel.kind", "none") == find("multilevel", "none").settings()
