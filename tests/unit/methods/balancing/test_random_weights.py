"""Random loss weighting: what the draws follow from, and how they are spread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step

THREE = ToyObjective(tasks=("a", "b", "c", "beside"), outside={3: 0.4})
ALL = {0: [1.0], 1: [2.0], 2: [3.0], 3: [1.0]}


def weights(step: int, elements: dict[int, list[float]] = ALL, **settings: float) -> list[float]:
    return take_step(balancer(THREE, "random", **settings), THREE, given, [batch(elements)], step=step).weights


def test_weights_of_present_tasks_sum_to_one_beside_the_others() -> None:
    for step in range(20):
        found = weights(step)
        assert sum(found[:3]) == pytest.approx(1.0, rel=1e-14) and min(found[:3]) > 0 and found[3] == 0.4
        absent = weights(step, {0: [1.0], 2: [3.0]})
        assert absent[1] == 0.0 and sum(absent[:3]) == pytest.approx(1.0, rel=1e-14)
        assert absent[0] / absent[2] == pytest.approx(found[0] / found[2], rel=1e-12), "the same draws"
    assert weights(0, {3: [1.0]}) == [0.0, 0.0, 0.0, 0.4]


def test_they_follow_from_seed_and_step_alone() -> None:
    again = balancer(THREE, "random")
    assert take_step(again, THREE, given, [batch(ALL)], step=7).weights == weights(7) != weights(8)
    assert again.state_dict() == {}, "a resumed run draws as the whole one did"
    again.run.config.training.seed = 1
    assert take_step(again, THREE, given, [batch(ALL)], step=7).weights != weights(7)


def test_draws_are_standard_normal() -> None:
    """The log-ratio of two weights is the difference of two draws over the temperature: variance 2 / temperature^2."""
    count, temperature = 2000, 0.5
    pairs = [weights(step, temperature=temperature) for step in range(count)]
    ratios = np.array([math.log(found[0] / found[1]) for found in pairs])
    deviation = math.sqrt(2.0) / temperature
    assert abs(ratios.mean()) < 4 * deviation / math.sqrt(count)
    assert ratios.std() == pytest.approx(deviation, rel=4 / math.sqrt(2 * count))
