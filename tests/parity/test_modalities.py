"""Invariant 1 for MM-MAE with each balancer: the same weights however the global batch is split, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from tests.grids import always
from tests.parity.compare import RELATIVE, TRAVELLED, distances, run_alone, steps_too_far, too_far
from tests.ranks import Ranks
from tests.synthetic import SPLITS, TWO_RANKS, Layout, Result
from tests.synthetic_modalities import Absent, run_modalities

STEPS = 5

BALANCING: dict[str, dict[str, Any]] = {
    "uniform": {"kind": "uniform"},
    "proportional": {"kind": "proportional"},
    "minimax": {"kind": "minimax", "alpha": 4.0, "scale": "initial"},
    "group_dro": {"kind": "group_dro", "rate": 0.3},
    "uncertainty": {"kind": "uncertainty", "lr": 0.05, "form": "kendall"},
    "dwa": {"kind": "dwa", "interval_steps": 1, "temperature": 0.05},
    "gradnorm": {"kind": "gradnorm", "lr": 0.05},
    "representation": {"kind": "gradnorm", "lr": 0.05, "at": "representation"},
    "jd": {"kind": "jd"},
}
ACROSS = ("minimax", "uncertainty", "gradnorm", "representation", "jd")
"""Compared over engines here; the other balancers read nothing but losses, and all are in test_balancers.py."""
LAYOUTS = ("accumulation 1", "ddp", "fsdp", "zero2", "zero3")


def sometimes_absent(step: int) -> Absent:
    """Each is gone once."""
    return {1: ("depth",), 3: ("semseg",)}.get(step, ())


def changes(balancing: str) -> dict[str, Any]:
    """Half of them with sums over elements, half with a norm after the encoder; four tasks, of which two predict the
    image."""
    reduction = "element" if len(balancing) % 2 else "sample"
    norm = balancing in ("proportional", "minimax", "dwa", "gradnorm")
    return {
        "balancer": BALANCING[balancing],
        "objective": {"reduction": reduction},
        "modalities": {"outputs": ["rgb", "depth", "semseg", "raw_rgb"], "encoder_norm": norm},
        "training": {"steps": STEPS},
    }


def arguments(balancing: str) -> tuple[dict[str, Any], Callable[[int], Absent]]:
    """Arguments of a run after its layout."""
    return changes(balancing), sometimes_absent


@lru_cache
def reference(balancing: str) -> Result:
    """Plain, accumulation 4."""
    return run_modalities(Layout(micro_size=2), *arguments(balancing))


def differences(ours: Result, theirs: Result) -> list[str]:
    """As compare.too_far; a tensor that starts at 0 has a norm that is the distance it travelled, and is held to that
    limit. (The queries' biases in a decoder's block travel 1e-3 in all.)"""
    return [
        f"{name}: {relative:.1e} of its norm, {travelled:.1e} of the distance travelled"
        for name, (relative, travelled) in distances(ours, theirs, skip_key_biases=True).items()
        if travelled > TRAVELLED or (relative > RELATIVE and (name == "all" or theirs.initial[name].any()))
    ]


def agree(ours: Result, balancing: str) -> None:
    theirs = reference(balancing)
    assert ours.moved and differences(ours, theirs) == steps_too_far(ours, theirs) == []


@pytest.mark.parametrize(
    ("balancing", "layout"),
    always(
        product(ACROSS, LAYOUTS),
        *(("minimax", "zero2"), ("uncertainty", "accumulation 1"), ("gradnorm", "fsdp"), ("jd", "ddp")),
        ("representation", "accumulation 1"),
    ),
)
def test_every_split_gives_the_same_weights(two_ranks: Ranks, balancing: str, layout: str) -> None:
    agree(two_ranks.run_layout(run_modalities, SPLITS[layout], *arguments(balancing))[0], balancing)


FOUR = {"inputs": ["rgb", "depth", "semseg", "normals"], "outputs": ["rgb", "depth", "semseg", "normals"]}


def without_normals(step: int) -> Absent:
    return ("normals",) if step == 2 else ()


def normals(loss: str) -> dict[str, Any]:
    return {**changes("minimax"), "modalities": {**FOUR, "visible_tokens": 12}, "normals": {"loss": loss}}


@pytest.mark.parametrize("loss", always(["cosine", "l1"], "cosine"))
def test_accumulation_gives_the_same_weights_with_surface_normals(loss: str) -> None:
    ours = run_modalities(Layout(micro_size=8), normals(loss), without_normals)
    theirs: Result = run_alone(run_modalities, normals(loss), without_normals)
    assert ours.moved and differences(ours, theirs) == []
    weights = [stats.task_weights for stats in theirs.steps]
    assert weights[2][3] == 0.0 and weights[1][3] > 0.0, "absent from one step"


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["fsdp", "zero3"])
def test_two_ranks_give_the_same_weights_with_surface_normals(two_ranks: Ranks, layout: str) -> None:
    ours = two_ranks(run_modalities, TWO_RANKS[layout], normals("cosine"), without_normals)[0]
    theirs: Result = run_alone(run_modalities, normals("cosine"), without_normals)
    assert ours.moved and differences(ours, theirs) == steps_too_far(ours, theirs) == []


@pytest.mark.parametrize("compared", [ACROSS, pytest.param(tuple(BALANCING), marks=pytest.mark.exhaustive)], ids=len)
def test_no_two_balancers_do_the_same_and_absent_tasks_have_no_weight(compared: tuple[str, ...]) -> None:
    for number, balancing in enumerate(compared):
        for other in compared[number + 1 :]:
            if set(reference(balancing).weights) != set(reference(other).weights):
                continue  # one of the two has a norm after the encoder: another network
            assert too_far(reference(balancing), reference(other)), (balancing, other)
        weights = [stats.task_weights for stats in reference(balancing).steps]
        assert weights[1][1] == weights[3][2] == 0.0
        assert weights[2][1] > 0.0 and weights[2][2] > 0.0
