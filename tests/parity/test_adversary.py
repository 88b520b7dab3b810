"""Invariant 1 with an adversary: the same weights and the same perturbation however the global batch is split."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.distributed.engine_layouts import shipped
from tests.grids import always, grid
from tests.parity.compare import RELATIVE, TRAVELLED, distances, run_alone, steps_too_far, too_far
from tests.ranks import RankError, Ranks
from tests.synthetic import SPLITS, Layout
from tests.synthetic_images import AdversarialResult, SyntheticImages, TwoHalves, image_config, run_images
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.fsdp import FsdpEngine

KINDS: dict[str, dict[str, Any]] = {
    "absolute_embedding": {"lr": 10.0, "eps": 0.3},
    "absolute_coordinate": {"lr": 15.0, "eps": 0.1},
    "relative_embedding": {"lr": 300.0, "eps": 0.2},
    "relative_coordinate": {"lr": 60000.0, "eps": 0.2},
    "bias_embedding": {"kind": "relative_embedding", "lr": 300.0, "eps": 0.2},
    "values_coordinate": {"kind": "relative_coordinate", "lr": 20000.0, "eps": 0.2},
}
"""Rates at which each kind goes a good part of the way to its ball's edge, and balls that some of it reaches."""

VISION = {
    "bias_embedding": {"relative_mode": "bias"},
    "values_coordinate": {"relative_mode": "bias", "relative_values": True},
}
"""Relative positions other than contextual ones on keys."""

NORM = {
    "absolute_embedding": "linf",
    "absolute_coordinate": "l2",
    "relative_embedding": "l2",
    "relative_coordinate": "linf",
}

LAYOUTS = {**SPLITS, "zero3_offload": shipped("ds_configs/zero3_offload.json")}

BALANCING: dict[str, dict[str, Any]] = {
    "exact": {"kind": "minimax", "estimate": "exact", "alpha": 4.0},
    "lagged": {"kind": "minimax", "estimate": "lagged", "alpha": 4.0},
}

STEPS = 5
"""Relative coordinates only begin at the second, when the tables are no longer zero, and have three to their edge."""

EPSILON = 1e-4
"""Of AdamW: with 1e-6 it scales rounding up towards the learning rate where a gradient is nearly zero. In one element
of a bias at the first step that is 3e-5 of the whole bias, which a few steps do not make up for."""

NORMALISED = 1e-3
"""The rules that divide by a gradient's size flip where it is nearly zero, so that rounding shows."""


def changes(kind: str, *, balancer: str = "", **adversary: Any) -> dict[str, Any]:
    """Settings of a run with this adversary at the encoder and the decoder, by default climbing by sgd."""
    settings = {"ascent": "sgd", "norm": NORM.get(kind, "linf"), "where": "both", "check_every": 1}
    return {
        "adversary": {**settings, "kind": kind, **KINDS.get(kind, {}), **adversary},
        "optimizer": {"kind": "adamw", "lr": 3e-3, "eps": EPSILON},
        "training": {"steps": STEPS},
        "vision": {"decoder_layers": 1, **VISION.get(kind, {})},
        **({"balancer": BALANCING[balancer]} if balancer else {}),
    }


def reference(settings: dict[str, Any], *, halves: bool = False) -> AdversarialResult:
    """Plain, accumulation 4."""
    found: AdversarialResult = run_alone(run_images, settings, halves=halves)
    return found


def vector_too_far(ours: AdversarialResult, theirs: AdversarialResult, relative: float, travelled: float) -> list[str]:
    """As compare.too_far, for the perturbation."""
    assert ours.vector is not None and theirs.vector is not None
    apart = float((ours.vector - theirs.vector).norm())
    of_norm, of_way = apart / float(theirs.vector.norm()), apart / theirs.travelled
    if of_norm > relative or of_way > travelled:
        return [f"adversary: {of_norm:.1e} of its norm, {of_way:.1e} of the distance travelled"]
    return []


def differences(ours: AdversarialResult, theirs: AdversarialResult) -> list[str]:
    return [*too_far(ours, theirs), *vector_too_far(ours, theirs, RELATIVE, TRAVELLED)]


def run_on(two_ranks: Ranks, layout: str, settings: dict[str, Any], *, halves: bool = False) -> AdversarialResult:
    """In one micro-batch on this process, or on two ranks; what the first of them found."""
    found: AdversarialResult = two_ranks.run_layout(run_images, LAYOUTS[layout], settings, halves=halves)[0]
    return found


def moved(result: AdversarialResult) -> None:
    assert result.moved and result.vector is not None
    assert all(stats.applied for stats in result.steps)
    assert result.vector.abs().max() > 0.005, "the adversary hardly moved: agreement would mean little"


@pytest.mark.parametrize(("kind", "accumulation", "norm"), grid(KINDS, [1, 2], ["l2", "linf"]))
def test_accumulation_changes_neither_weights_nor_adversary(kind: str, accumulation: int, norm: str) -> None:
    settings = changes(kind, norm=norm)
    theirs = reference(settings)
    moved(theirs)
    assert differences(run_images(SPLITS[f"accumulation {accumulation}"], settings), theirs) == []


def test_the_projection_and_the_adversary_s_effect_are_in_what_is_compared() -> None:
    for kind, own in KINDS.items():
        theirs = reference(changes(kind))
        assert theirs.vector is not None
        width = {"absolute_coordinate": 2, "relative_embedding": 16}.get(kind, 1)
        encoder = theirs.vector[: len(theirs.vector) // width * width]
        if kind != "relative_embedding":  # whose decoder balls are of another width
            sizes = encoder.view(-1, width).norm(dim=1)
            assert float(sizes.max()) == pytest.approx(own["eps"], rel=1e-4), kind
        without = reference({**changes(kind), "adversary": {"kind": "none"}})
        assert too_far(without, theirs), f"{kind} does nothing to the weights"


@pytest.mark.parametrize(
    ("kind", "layout"),
    always(
        # The other stages hold what is no parameter of theirs as these do: one kind is enough.
        [*product(KINDS, ["ddp", "fsdp", "zero2", "zero3"]), *product(["relative_coordinate"], ["zero0", "zero1"])],
        *zip(["relative_embedding", "values_coordinate", "absolute_embedding"], ["ddp", "fsdp", "zero2"], strict=True),
        ("relative_coordinate", "zero3"),
    ),
)
def test_two_ranks_give_the_weights_and_the_adversary_of_one(two_ranks: Ranks, kind: str, layout: str) -> None:
    settings = changes(kind)
    first, second = two_ranks(run_images, LAYOUTS[layout], settings)
    assert torch.equal(first.vector, second.vector)
    assert differences(first, reference(settings)) == []


@pytest.mark.parametrize(
    ("balancing", "update", "layout"),
    always(
        product(BALANCING, ["parallel", "sequential"], ["accumulation 1", "ddp", "fsdp", "zero3"]),
        ("exact", "parallel", "fsdp"),
        ("lagged", "sequential", "ddp"),
    ),
)
def test_it_composes_with_minimax(two_ranks: Ranks, balancing: str, update: str, layout: str) -> None:
    settings = changes("absolute_embedding", balancer=balancing, update=update)
    theirs = reference(settings, halves=True)
    moved(theirs)
    ours = run_on(two_ranks, layout, settings, halves=True)
    assert differences(ours, theirs) == []
    assert steps_too_far(ours, theirs, names=["task_weights"]) == []


def test_the_two_tasks_get_different_weights_and_both_updates_and_estimates_differ() -> None:
    """What the test above compares is not the same run four times."""
    found = [
        reference(changes("absolute_embedding", balancer=balancing, update=update), halves=True)
        for balancing in BALANCING
        for update in ("parallel", "sequential")
    ]
    assert all(abs(stats.task_weights[0] - 0.5) > 1e-3 for stats in found[0].steps)
    for number, one in enumerate(found):
        assert all(too_far(one, other) for other in found[number + 1 :])


SEQUENTIAL = ("absolute_coordinate", "relative_coordinate")


@pytest.mark.parametrize(
    ("kind", "layout"),
    always(
        product(SEQUENTIAL, ["accumulation 1", "ddp", "fsdp", "zero0", "zero1", "zero3", "zero3_offload"]),
        ("absolute_coordinate", "fsdp"),
        ("relative_coordinate", "zero1"),
    ),
)
def test_sequential_updates_agree(two_ranks: Ranks, kind: str, layout: str) -> None:
    settings = changes(kind, update="sequential")
    theirs = reference(settings)
    moved(theirs)
    assert differences(run_on(two_ranks, layout, settings), theirs) == []


NORMALISED_RULES: list[tuple[str, dict[str, Any]]] = [
    ("absolute_embedding", {"ascent": "adamw", "lr": 0.0}),
    ("absolute_coordinate", {"ascent": "adamw", "lr": 0.0}),
    ("relative_embedding", {"ascent": "adamw", "lr": 0.0}),
    ("absolute_embedding", {"ascent": "sign", "lr": 0.01}),
    ("relative_coordinate", {"ascent": "sign", "lr": 0.01}),
    ("absolute_embedding", {"ascent": "linear", "lr": 0.0, "norm": "l2", "update": "sequential"}),
]


@pytest.mark.parametrize(
    ("layout", "rule"),
    always(
        product(["accumulation 1", "fsdp", "zero2"], range(len(NORMALISED_RULES))),
        *(("zero2", 0), ("fsdp", 4), ("accumulation 1", 5)),
    ),
)
def test_the_normalised_rules_agree_as_far_as_rounding_lets_them(two_ranks: Ranks, rule: int, layout: str) -> None:
    kind, settings = NORMALISED_RULES[rule]
    every = changes(kind, **settings)
    theirs = reference(every)
    moved(theirs)
    ours = run_on(two_ranks, layout, every)
    assert vector_too_far(ours, theirs, NORMALISED, NORMALISED) == []
    relative, travelled = distances(ours, theirs, skip_key_biases=True)["all"]
    assert relative < NORMALISED and travelled < NORMALISED


@pytest.mark.parametrize(
    ("norm", "allowed", "layout"),
    always(
        [
            (norm, allowed, layout)
            for norm, allowed in (("l2", TRAVELLED), ("linf", NORMALISED))
            for layout in ("accumulation 1", "ddp", "fsdp", "zero2", "zero3")
        ],
        ("l2", TRAVELLED, "fsdp"),
        ("linf", NORMALISED, "accumulation 1"),
    ),
)
def test_shifts_of_pixels_agree(two_ranks: Ranks, norm: str, allowed: float, layout: str) -> None:
    """Of linf, the sign of a gradient that is nearly zero is rounding's."""
    settings = changes("absolute_embedding")
    settings["adversary"] = {"kind": "pixels", "norm": norm, "eps": 0.1 if norm == "linf" else 2.0}
    theirs = reference(settings)
    without = reference({**settings, "adversary": {"kind": "none"}})
    assert too_far(without, theirs), "the shift does nothing"
    ours = run_on(two_ranks, layout, settings)
    assert distances(ours, theirs, skip_key_biases=True)["all"][1] < allowed


def not_divided(engine: FsdpEngine, gradient: Tensor) -> Tensor:
    """Forgets that the loss carries the world."""
    return engine.data_group.sum(gradient)


def not_summed(engine: FsdpEngine, gradient: Tensor) -> Tensor:
    """Each rank climbs along its own gradient."""
    return gradient


def run_with_wrong_reduction(wrong: Any, settings: dict[str, Any]) -> AdversarialResult:
    with mock.patch.object(FsdpEngine, "reduce_hook_gradient", wrong):
        return run_images(LAYOUTS["fsdp"], settings)


@pytest.mark.parametrize("kind", always(KINDS, "relative_embedding"))
def test_a_gradient_not_divided_by_the_world_would_be_seen(two_ranks: Ranks, kind: str) -> None:
    ours = two_ranks(run_with_wrong_reduction, not_divided, changes(kind))[0]
    assert len(differences(ours, reference(changes(kind)))) > 5


@pytest.mark.exhaustive
def test_ranks_that_climb_apart_are_stopped(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0.*the ranks hold different adversaries.*rank 1.*the ranks hold"):
        two_ranks(run_with_wrong_reduction, not_summed, changes("absolute_embedding"))


def test_both_tasks_of_the_stand_in_are_uneven() -> None:
    window = SyntheticImages(image_config(Layout(micro_size=2)), ALONE).next_window()
    objective = TwoHalves(image_config(Layout()).objective, 4)
    counts = torch.stack([objective.count(micro) for micro in window])
    assert (counts > 0).all() and counts[:, 0].unique().numel() > 1
