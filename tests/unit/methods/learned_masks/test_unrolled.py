"""Unrolled steps against automatic differentiation through them, in float64 (MLO-MAE eq. 6-11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.synthetic_hypergradients import Watched
from tests.synthetic_masks import D_TR, D_VAL, MasksRun, labelled
from tests.unit.methods.learned_masks.exact_hypergradient import Rule, Weights, hypergradient, soft_mask
from tests.unit.methods.learned_masks.test_hypergradient import copies, relative, start

RATE = 0.05


def descent(rate: float) -> Rule:
    return lambda name, weight, gradient: weight - rate * gradient


def looked_ahead(
    settings: dict[str, Any], *, unroll: int, micro_size: int = 4, **kind: Any
) -> tuple[Weights, Weights, MasksRun]:
    """(ours, exact) at the start of the second cycle, whose weights, head and network have moved."""
    own = {"mode": "look_ahead", "unroll": unroll, "look_ahead_lr": RATE, **settings.pop("multilevel", {})}
    run = start(micro_size=micro_size, multilevel=own, **settings)
    assert run.hook is not None
    watched, config = Watched(run), run.trainer.config
    for _ in range(unroll):
        run.trainer.train_step()
    weights, head = copies(run.model), run.hook.outer.level.head.parameters  # type: ignore[attr-defined]
    run.trainer.train_step()
    size = config.batch.global_size
    exact = hypergradient(
        run.model,
        weights,
        run.networks[0],
        watched.network,
        (head.weight, head.bias),
        # A full derivative goes through the steps from the last to the first.
        lower=[watched.lower(number) for number in reversed(range(len(watched.windows)))],
        train=labelled(range(D_TR + size, D_TR + 2 * size)),
        validation=labelled(range(D_VAL + size, D_VAL + 2 * size)),
        encoder_rule=descent(RATE),
        head_rule=descent(config.multilevel.head_lr),
        **kind,
    )
    return watched.gradient, exact, run


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize("settings", [{}, {"vision": {"tokens": "all", "positions": "relative"}}])
def test_one_step_is_exact(settings: dict[str, Any], micro_size: int) -> None:
    ours, exact, _ = looked_ahead(dict(settings), unroll=1, micro_size=micro_size)
    assert relative(ours, exact) < 1e-6


@pytest.mark.parametrize("unroll", [2, 3])
def test_several_steps_are_exact_with_the_full_derivative(unroll: int) -> None:
    ours, exact, run = looked_ahead({"multilevel": {"derivative": "full"}}, unroll=unroll)
    assert run.hook is not None and run.hook.outer_steps == 2
    assert relative(ours, exact) < 1e-5


@pytest.mark.parametrize(
    ("selection", "kind"),
    [
        ({"selection": "straight_through"}, {"mask_of": lambda sigma, masked: sigma}),
        ({"selection": "softsort", "temperature": 0.3}, {"mask_of": soft_mask(0.3)}),
        (
            {"selection": "softsort", "temperature": 0.3, "weights": "normalised"},
            {"mask_of": soft_mask(0.3), "normalise": True},
        ),
    ],
)
def test_a_choice_with_a_derivative_of_its_own(selection: dict[str, Any], kind: dict[str, Any]) -> None:
    ours, exact, _ = looked_ahead({"multilevel": selection}, unroll=1, **kind)
    hard, _, _ = looked_ahead({"multilevel": {**selection, "selection": "hard"}}, unroll=1)
    assert relative(ours, exact) < 1e-6
    assert relative(hard, exact) > 0.05, "the choice's derivative is no part of what is compared"


def test_the_steps_are_taken_back_and_the_real_ones_see_the_same_images() -> None:
    """With a network that does not learn, a run that unrolls steps is one that does not, bit for bit."""

    def weights(mode: str) -> Weights:
        run = start(multilevel={"mode": mode, "unroll": 2, "lr": 1e-30, "weight_decay": 0.0, "head_lr": 0.03})
        for _ in range(4):
            run.trainer.train_step()
        assert run.hook is not None and run.hook.outer_steps == 2
        return copies(run.model)

    committed, ahead = weights("committed"), weights("look_ahead")
    assert all(torch.equal(committed[name], ahead[name]) for name in committed)
