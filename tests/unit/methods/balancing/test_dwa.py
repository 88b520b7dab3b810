"""Dynamic weight average: its intervals, who has no two means yet, and ratios that references would spoil."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.methods.balancing.toy import (
    ToyObjective,
    balancer,
    batch,
    given,
    stand_in_run,
    take_step,
    weigh_history,
)
from trp_scale.config import RefusedError
from trp_scale.config.registry import make_settings
from trp_scale.core.hooks import build_hooks

THREE = ToyObjective(tasks=("a", "b", "c"))


def run(history: list[dict[int, float]], **settings: Any) -> tuple[Any, list[list[float]]]:
    weigher = balancer(THREE, "dwa", **{"interval_steps": 2, "total": "paper", **settings})
    return weigher, weigh_history(weigher, THREE, history)


def from_ratios(ratios: list[float], temperature: float = 2.0) -> list[float]:
    powers = [math.exp(ratio / temperature) for ratio in ratios]
    return [3 * power / sum(powers) for power in powers]


HISTORY = [{0: 4.0, 1: 1.0, 2: 3.0}, {0: 2.0, 1: 1.0, 2: 1.0}] + [{0: 1.0, 1: 2.0, 2: 2.0}] * 2


def test_weights_are_ones_in_two_intervals_and_then_follow_the_ratio_of_their_means() -> None:
    weigher, weights = run([*HISTORY, {0: 9.0, 1: 9.0, 2: 9.0}, {0: 0.1, 1: 9.0, 2: 9.0}])
    assert weights[:4] == [pytest.approx([1.0] * 3, rel=1e-15)] * 4
    assert weights[4:] == [pytest.approx(from_ratios([1 / 3, 2.0, 1.0]), rel=1e-14)] * 2  # all through the interval
    found = weigher.metrics()
    assert (found["interval"], found["interval_steps"]) == (2, 2)
    assert found["ratios"] == pytest.approx({"a": 1 / 3, "b": 2.0, "c": 1.0})


def test_an_interval_is_an_epoch_unless_steps_are_given() -> None:
    def steps(interval_steps: int, epoch: int) -> Any:
        config = make_settings("balancer", "dwa", interval_steps=interval_steps)
        return build_hooks(stand_in_run(config, THREE, epoch)).balancer.metrics()["interval_steps"]

    assert steps(0, 7) == 7
    assert steps(3, 7) == 3
    with pytest.raises(RefusedError, match=r"--balancer\.interval_steps is 0.*allowed: 1 or more"):
        steps(0, 0)


def test_a_mean_is_over_the_applied_steps_in_which_the_task_was_there() -> None:
    weigher = balancer(THREE, "dwa", interval_steps=3, total="paper")
    losses: list[tuple[dict[int, float], bool]] = [
        ({0: 4.0, 1: 1.0, 2: 3.0}, True),
        ({0: 2.0, 1: 1.0}, True),
        ({0: 99.0, 1: 99.0, 2: 99.0}, False),
        *[({0: 1.0, 1: 3.0, 2: 6.0}, True)] * 3,
        ({0: 1.0, 1: 1.0, 2: 1.0}, True),
    ]
    for step, (each, applied) in enumerate(losses):
        window = [batch({t: [loss] for t, loss in each.items()})]
        taken = take_step(weigher, THREE, given, window, step=step, applied=applied)
    assert taken.weights == pytest.approx(from_ratios([1 / 3, 3.0, 2.0]), rel=1e-14)


def test_a_task_without_two_means_takes_the_mean_ratio_and_an_interval_without_it_does_not_count() -> None:
    absent = [{t: losses[t] for t in (0, 1)} for losses in HISTORY]
    _, weights = run([*absent, {0: 1.0, 1: 1.0, 2: 5.0}])
    assert weights[4] == pytest.approx(from_ratios([1 / 3, 2.0, (1 / 3 + 2.0) / 2]), rel=1e-14)
    # c is away for the third interval: its ratio of the first two stays, the others' go on.
    _, weights = run([*HISTORY, *[{0: 1.0, 1: 1.0}] * 2, {0: 1.0, 1: 1.0, 2: 1.0}])
    assert weights[6] == pytest.approx(from_ratios([1.0, 0.5, 1.0]), rel=1e-14)


@pytest.mark.parametrize("reference", [3.0, 1.0, 2.9])
def test_a_loss_at_or_below_its_reference_leaves_a_ratio_above_zero(reference: float) -> None:
    """a goes from 3 to 1: below or at the reference in one interval or both."""
    _, weights = run([*HISTORY, {0: 1.0, 1: 1.0, 2: 1.0}], scale="reference", reference={"a": reference})
    ratio = {3.0: 1.0, 1.0: 1e-3 / 2.0, 2.9: 1e-3 / 0.1}[reference]
    assert weights[4] == pytest.approx(from_ratios([ratio, 2.0, 1.0]), rel=1e-12)
