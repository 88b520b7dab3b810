"""TRP Appendix C: A (x - 1)^2 against T - 1 times x^2, where the average does T times worse than the maximum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.methods.balancing.toy import ClosedForm, balancer, descend

TASKS = 9
SHARPNESS = [2.0, 8.0]  # A; the appendix takes 1 < A < T, and A = T - 1 for its ratio


def problem(a: float) -> ClosedForm:
    def losses(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([a * (x - 1).square(), x.square().expand(TASKS - 1)])

    return ClosedForm(losses, TASKS)


def best_point(a: float) -> float:
    """Where A (x - 1)^2 = x^2 between 0 and 1; the appendix prints the other root, sqrt(A) / (sqrt(A) - 1)."""
    return math.sqrt(a) / (math.sqrt(a) + 1)


def shrinking(step: int) -> float:
    """Steps for a maximum of functions whose second derivative is at least 2."""
    return 1 / (step + 20)


def settle(a: float, **settings: Any) -> float:
    """The mean of the last half of the points: gradients of a maximum do not fade, so single points keep jumping."""
    path = descend(problem(a), balancer(problem(a), **settings), [0.0], steps=800, rate=shrinking)
    return float(path.points[400:].mean())


@pytest.mark.parametrize("a", SHARPNESS)
def test_the_hard_maximum_reaches_it(a: float) -> None:
    found = settle(a, alpha_schedule="hard")
    assert found == pytest.approx(best_point(a), abs=4e-3)
    assert problem(a).worst(torch.tensor([found])) == pytest.approx(a / (math.sqrt(a) + 1) ** 2, rel=0.05)


@pytest.mark.parametrize("a", SHARPNESS)
def test_the_schedule_of_the_theorem_reaches_it(a: float) -> None:
    # On [0, 1]: losses of at most A, slopes of at most 2 A, and no start farther away than 1.
    found = settle(a, alpha_schedule="theorem", radius=1.0, lipschitz=2 * a, bound=a)
    assert found == pytest.approx(best_point(a), abs=5e-3)
    assert problem(a).worst(torch.tensor([found])) == pytest.approx(a / (math.sqrt(a) + 1) ** 2, rel=0.05)


@pytest.mark.parametrize("a", SHARPNESS)
def test_uniform_weights_settle_at_the_average_and_do_worse(a: float) -> None:
    path = descend(problem(a), balancer(problem(a), "uniform"), [0.0], steps=150, rate=lambda step: 0.2)
    average = float(path.points[-1])
    assert average == pytest.approx(a / (a + TASKS - 1), abs=1e-9)
    worst = problem(a).worst(path.points[-1])
    assert worst == pytest.approx(a * (TASKS - 1) ** 2 / (a + TASKS - 1) ** 2, abs=1e-8)
    ratio = worst / (a / (math.sqrt(a) + 1) ** 2)
    assert ratio > 1.1
    if a == TASKS - 1:
        assert ratio >= (math.sqrt(TASKS - 1) + 1) ** 2 / 4 - 1e-9  # grows as T, with the right root in its place
