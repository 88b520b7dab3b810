"""FAMO on a fixed batch, where the next batch's losses are those after the update: the authors' algorithm itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.methods.balancing.toy import ClosedForm, ToyObjective, balancer, batch, descend, given, take_step

TARGETS, CURVES = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.tensor([1.0, 0.1, 4.0])


def bowls(point: Tensor) -> Tensor:
    """Three squared distances of different curvature from different minima, all above 0."""
    return CURVES * (point[0] - TARGETS).square() + 0.1


def authors_weights(start: float, steps: int, rate: float, lr: float, gamma: float) -> Tensor:
    """Liu et al., Algorithm 1: losses before and after each update of the point, [K, T] weights."""
    point = torch.tensor([start], dtype=torch.float64)
    xi = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([xi], lr=lr, weight_decay=gamma)
    weights = []
    for _ in range(steps):
        point.requires_grad_()
        losses = bowls(point)
        z = torch.softmax(xi.detach(), 0)
        weights.append((z / losses.detach()) / (z / losses.detach()).sum())
        (gradient,) = torch.autograd.grad((z * losses.log()).sum() / (z / losses.detach()).sum(), point)
        point = (point - rate * gradient).detach()
        fall = losses.detach().log() - bowls(point).log()
        adam.zero_grad()
        torch.softmax(xi, 0).backward(fall)
        adam.step()
    return torch.stack(weights)


def test_on_a_fixed_batch_it_is_the_authors_algorithm_without_its_second_evaluation() -> None:
    problem = ClosedForm(bowls, 3)
    path = descend(problem, balancer(problem, "famo", lr=0.1, gamma=0.01), [3.0], steps=30, rate=lambda _: 0.05)
    expected = authors_weights(3.0, 30, 0.05, 0.1, 0.01)
    torch.testing.assert_close(path.weights, expected, rtol=1e-10, atol=1e-12)
    alone = authors_weights(3.0, 30, 0.05, 1e-9, 0.01)
    assert (path.weights - alone).abs().max() > 0.05, "the logits hardly moved"


def test_a_slow_task_gains_and_an_absent_one_keeps_its_logit() -> None:
    objective = ToyObjective(tasks=("slow", "fast", "rare"))
    weigher = balancer(objective, "famo")
    losses = [{0: [2.0], 1: [2.0], 2: [2.0]}, {0: [1.9], 1: [1.0], 2: [1.5]}, {0: [1.8], 1: [0.5]}]
    logits = []
    for step, micro in enumerate(losses):
        weights = take_step(weigher, objective, given, [batch(micro)], step=step).weights
        assert sum(weights) == pytest.approx(1.0, rel=1e-14)
        logits.append(weigher.metrics()["logits"])
    assert logits[0] == {"slow": 0.0, "fast": 0.0, "rare": 0.0}
    assert logits[1]["slow"] > 0 > logits[1]["fast"]
    assert weights[2] == 0.0 and logits[2]["rare"] == logits[1]["rare"]
