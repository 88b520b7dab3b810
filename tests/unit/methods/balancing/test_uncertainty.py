"""Uncertainty weights, beside the reference run: what s leaves alone, where it settles with scaled losses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step, weigh_history
from trp_scale.methods.balancing.base import SMALLEST_EXCESS

OBJECTIVE = ToyObjective(tasks=("a", "b", "c", "far"), outside={3: 0.4}, regression=(1,))
LOSSES = {0: 3.0, 1: 0.2, 2: 1.7}


def settled(losses: dict[int, float], steps: int, **settings: Any) -> Any:
    """A balancer after steps on the same losses."""
    weigher = balancer(OBJECTIVE, "uncertainty", **{"lr": 0.05, **settings})
    weigh_history(weigher, OBJECTIVE, [losses] * steps)
    return weigher


def test_the_regulariser_is_reported_and_is_no_part_of_the_loss() -> None:
    for form, share in (("multimae", 1.0), ("kendall", 0.5)):
        weigher = settled(LOSSES, 10, form=form)
        found = weigher.metrics()
        assert found["regulariser"] == pytest.approx(share * sum(found["log_variances"].values()), rel=1e-14)
        assert set(found["log_variances"]) == {"a", "b", "c"}
        step = take_step(weigher, OBJECTIVE, given, [batch({0: [3.0], 2: [1.0]})], step=10)
        assert sum(step.totals) == pytest.approx(step.weights[0] * 3.0 + step.weights[2], rel=1e-14)


def test_scaled_losses_are_what_s_follows() -> None:
    weigher = balancer(OBJECTIVE, "uncertainty", lr=0.05, scale="initial")
    weigh_history(weigher, OBJECTIVE, [LOSSES, *[{t: loss / 4 for t, loss in LOSSES.items()}] * 399])
    assert weigher.metrics()["log_variances"] == pytest.approx(dict.fromkeys("abc", math.log(0.25)), abs=2e-3)
    assert weigher.metrics()["scaled"] == pytest.approx(dict.fromkeys("abc", 0.25))


def test_a_loss_below_its_reference_does_not_let_s_fall_without_end() -> None:
    found = settled({0: 3.0}, 400, scale="reference", reference={"a": 3.5}, lr=0.1).metrics()
    assert found["log_variances"]["a"] == pytest.approx(math.log(SMALLEST_EXCESS), abs=0.05)
