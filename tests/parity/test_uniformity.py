"""Invariant 1 for U-MAE, whose loss is over all pairs of the global batch, on every engine and split."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from tests.grids import always
from tests.parity.compare import steps_too_far, too_far
from tests.parity.test_learned_masks import ROUNDING
from tests.ranks import Ranks
from tests.synthetic import SPLITS, Layout
from tests.synthetic_images import AdversarialResult, run_images
from tests.synthetic_masks import run_masks

STEPS = 4
PIXELS = {"kind": "pixels", "norm": "l2", "eps": 2.0}
COORDINATE = {"kind": "absolute_coordinate", "ascent": "sgd", "lr": 15.0, "eps": 0.1, "norm": "l2"}
COMPANY: dict[str, dict[str, Any]] = {
    "alone": {},
    "pixels": {"adversary": PIXELS},
    "positions": {"adversary": COORDINATE},
}
LAYOUTS = {**SPLITS, "fsdp, accumulation 1": Layout(engine="fsdp", micro_size=4)}
ALONE = ("accumulation 1", "accumulation 2", "ddp", "fsdp", "fsdp, accumulation 1", "zero2", "zero3")
CASES = [*product(["alone"], ALONE), *product(["pixels", "positions"], ["accumulation 1", "fsdp"])]


def changes(company: str, *, uniformity: float = 0.5) -> dict[str, Any]:
    return {
        "objective": {"uniformity": uniformity},
        "vision": {"decoder_layers": 1, "positions": "absolute"},
        "optimizer": {"lr": 3e-3, "eps": 1e-4},
        "training": {"steps": STEPS},
        **COMPANY[company],
    }


@lru_cache
def reference(company: str) -> AdversarialResult:
    """Plain, accumulation 4."""
    return run_images(Layout(micro_size=2), changes(company))


@pytest.mark.parametrize(
    ("company", "layout"),
    always(
        CASES,
        *(("alone", layout) for layout in ("accumulation 1", "fsdp", "zero2")),
        ("positions", "accumulation 1"),
        ("pixels", "fsdp"),
    ),
)
def test_every_split_gives_the_same_weights(two_ranks: Ranks, company: str, layout: str) -> None:
    ours = two_ranks.run_layout(run_images, LAYOUTS[layout], changes(company))[0]
    assert ours.moved and too_far(ours, reference(company)) == []
    assert steps_too_far(ours, reference(company), names=["task_losses", "grad_norm"]) == []
    assert all(0.0 < mine.task_losses[1] < 1.0 and mine.task_weights == (1.0, 0.5) for mine in ours.steps)


def test_it_changes_the_weights_and_spreads_the_class_tokens() -> None:
    without = run_images(Layout(micro_size=8), changes("alone", uniformity=0.0))
    for company in COMPANY:
        assert len(too_far(without, reference(company))) > 10
    assert len(without.steps[0].task_losses) == 1
    spread = [stats.task_losses[1] for stats in reference("alone").steps]
    assert spread[-1] < spread[0]


SECOND_LEVELS = ("head", "joint")


@pytest.mark.parametrize(
    ("level", "layout"),
    always(product(SECOND_LEVELS, ["accumulation 1", "ddp", "fsdp"]), ("head", "accumulation 1"), ("joint", "fsdp")),
)
def test_it_composes_with_learned_masks(two_ranks: Ranks, level: str, layout: str) -> None:
    multilevel = {**ROUNDING["multilevel"], "kind": level}
    settings = {**ROUNDING, "multilevel": multilevel, "objective": {"uniformity": 0.5}, "training": {"steps": STEPS}}
    theirs = run_masks(Layout(micro_size=2), settings)
    ours = two_ranks.run_layout(run_masks, LAYOUTS[layout], settings)[0]
    assert ours.moved and too_far(ours, theirs) == []
    assert any(not theirs.network[name].equal(theirs.network_initial[name]) for name in theirs.network)
    assert steps_too_far(ours, theirs, names=["task_losses", "grad_norm"]) == []
    assert all(0.0 < mine.task_losses[1] < 1.0 and mine.task_weights[1] == 0.5 for mine in ours.steps)
