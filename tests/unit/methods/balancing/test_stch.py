"""Smooth Tchebycheff: TRP eq. 7 as a case of it, its limits, and the point that preferences select."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.methods.balancing.toy import ClosedForm, ToyObjective, balancer, batch, descend, given, take_step
from trp_scale.config import RefusedError

THREE = ToyObjective(tasks=("a", "b", "c"))
LOSSES = {0: [1.0, 3.0], 1: [2.5], 2: [0.5]}


def weights(kind: str, losses: dict[int, list[float]] = LOSSES, **settings: object) -> list[float]:
    return take_step(balancer(THREE, kind, **settings), THREE, given, [batch(losses)]).weights


@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_equal_preferences_on_losses_give_minimax_with_alpha_one_over_mu(mu: float) -> None:
    assert weights("stch", mu=mu) == pytest.approx(weights("minimax", alpha=1 / mu), rel=1e-13)


def test_logarithms_do_not_depend_on_the_unit_of_a_loss() -> None:
    """A unit 10 times smaller gives a loss 10 times larger and a tenth of its weight."""
    weigher, scaled = (balancer(THREE, "stch", form="logarithms", scale="initial", mu=0.5) for _ in range(2))
    for step, factor in enumerate((1.0, 0.7)):
        plain = take_step(weigher, THREE, given, [batch({0: [2.0 * factor], 1: [2.0], 2: [1.0]})], step=step).weights
        tenfold = take_step(scaled, THREE, given, [batch({0: [20.0 * factor], 1: [2.0], 2: [1.0]})], step=step).weights
        assert tenfold[0] / tenfold[1] == pytest.approx(plain[0] / plain[1] / 10, rel=1e-12)
        assert tenfold[1] / tenfold[2] == pytest.approx(plain[1] / plain[2], rel=1e-12)


def test_small_mu_descends_to_equal_preferred_losses() -> None:
    """The minimiser of max{p_1 (x - 1)^2, p_2 (x + 1)^2} has equal preferred losses: x = (r - 1) / (r + 1), r^2 = p_1 /
    p_2."""

    def losses(point: Tensor) -> Tensor:
        return torch.stack([(point[0] - 1).square(), (point[0] + 1).square()])

    problem = ClosedForm(losses, 2)
    weigher = balancer(problem, "stch", mu=1e-3, preference={"f0": 4.0})
    path = descend(problem, weigher, [0.0], steps=800, rate=lambda step: 0.1 / (1 + step) ** 0.8)
    assert float(path.points[-1]) == pytest.approx(1 / 3, abs=2e-3)


def test_an_unknown_task_in_the_preferences_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"balancer\.preference .*'d'"):
        balancer(THREE, "stch", preference={"d": 1.0})
