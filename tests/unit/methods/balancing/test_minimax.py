"""Weights of eq. 7 against closed forms in float64, and all settings that change them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step, weigh_history
from trp_scale.methods.balancing.global_losses import softmax_weights, spread_alpha, theorem_alpha

THREE = ToyObjective(tasks=("a", "b", "c"))


def softmax(scores: dict[int, float], size: int) -> list[float]:
    """exp(s_t) / sum exp(s), with 0 for tasks that are not named."""
    total = sum(math.exp(score) for score in scores.values())
    return [math.exp(scores[t]) / total if t in scores else 0.0 for t in range(size)]


def exactly(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-14)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 7.0])
def test_weights_are_the_softmax_of_alpha_times_loss(alpha: float) -> None:
    losses = [2.5, 4.0, 3.25]
    weights = softmax_weights(torch.tensor(losses, dtype=torch.float64), alpha, torch.ones(3, dtype=torch.bool))
    assert weights.dtype == torch.float64
    assert weights.tolist() == exactly(softmax({t: alpha * loss for t, loss in enumerate(losses)}, 3))


def test_a_large_alpha_does_not_overflow() -> None:
    losses = torch.tensor([10.0, 9.9999, 3.0], dtype=torch.float64)
    weights = softmax_weights(losses, 1e5, torch.ones(3, dtype=torch.bool))
    odds = math.exp(-1e5 * float(losses[0] - losses[1]))
    assert weights.tolist() == pytest.approx([1 / (1 + odds), odds / (1 + odds), 0.0], rel=1e-9)


@pytest.mark.parametrize("alpha", [1.0, math.inf])
@pytest.mark.parametrize("rubbish", [0.0, 99.0, math.nan, math.inf])
def test_the_loss_of_a_task_that_is_not_eligible_is_never_read(alpha: float, rubbish: float) -> None:
    losses = torch.tensor([1.0, rubbish, 2.0], dtype=torch.float64)
    weights = softmax_weights(losses, alpha, torch.tensor([True, False, True])).tolist()
    expected = [0.0, 0.0, 1.0] if math.isinf(alpha) else softmax({0: 1.0, 2: 2.0}, 3)
    assert weights == exactly(expected)


@pytest.mark.parametrize("alpha", [1.0, math.inf])
def test_with_no_eligible_task_all_weights_are_zero(alpha: float) -> None:
    losses = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert softmax_weights(losses, alpha, torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_an_absent_task_is_left_out_and_is_not_a_loss_of_zero() -> None:
    step = take_step(balancer(THREE), THREE, given, [batch({0: [1.0, 2.0], 2: [4.0]})])
    assert step.weights == exactly(softmax({0: 1.5, 2: 4.0}, 3))
    assert step.weights != pytest.approx(softmax({0: 1.5, 1: 0.0, 2: 4.0}, 3), abs=1e-3)


def test_the_hard_maximum_takes_the_worst_mean_not_the_worst_sum() -> None:
    weigher = balancer(THREE, alpha_schedule="hard")
    step = take_step(weigher, THREE, given, [batch({0: [2.0] * 9, 1: [3.0], 2: [1.0]})])
    assert step.weights == [0.0, 1.0, 0.0]


def test_a_task_below_min_count_takes_no_part() -> None:
    window = [batch({0: [1.0] * 5, 1: [9.0], 2: [2.0] * 3})]
    for count in (2, 3, 100):  # below the limit, at it, and where it leaves no task: then all present ones take part
        weights = take_step(balancer(THREE, min_count=count), THREE, given, window).weights
        expected = {0: 1.0, 2: 2.0} | ({1: 9.0} if count == 100 else {})
        assert weights == exactly(softmax(expected, 3)), count


def test_min_count_is_of_the_global_batch_with_micro_estimates_too() -> None:
    window = [batch({0: [1.0] * 2, 2: [2.0] * 2}), batch({0: [1.0] * 2, 2: [2.0]})]
    settings = {"estimate": "micro", "min_count": 3}
    assert take_step(balancer(THREE, **settings), THREE, given, window).weights[2] > 0.5
    assert take_step(balancer(THREE, **{**settings, "min_count": 4}), THREE, given, window).weights[2] == 0.0


@pytest.mark.parametrize("estimate", ["exact", "lagged"])
def test_loss_ema_is_the_recursion_on_the_losses(estimate: str) -> None:
    """m_k = g m_{k-1} + (1 - g) L_k with m_0 = L_0, standing still while a task is absent."""
    g = 0.75
    weigher = balancer(THREE, loss_ema=g, estimate=estimate, alpha=2.0)
    seen: list[dict[int, float]] = [
        {0: 4.0, 1: 1.0, 2: 2.0},
        {0: 1.0, 2: 3.0},
        {0: 2.0, 1: 5.0, 2: 1.0},
        {0: 1.0, 1: 1.0},
    ]
    smooth: dict[int, float] = {}
    for losses, weights in zip(seen, weigh_history(weigher, THREE, seen), strict=True):
        before = dict(smooth)
        for task, loss in losses.items():
            smooth[task] = g * smooth[task] + (1 - g) * loss if task in smooth else loss
        source = smooth if estimate == "exact" else before or dict.fromkeys(losses, 0.0)
        assert weights == exactly(softmax({t: 2.0 * source[t] for t in losses}, 3)), losses


def test_scale_initial_bears_a_first_loss_of_zero() -> None:
    """The cross-entropy over a single class is 0."""
    for weights in weigh_history(balancer(THREE, scale="initial"), THREE, [{0: 1.0, 2: 0.0}] * 2):
        assert sum(weights) == pytest.approx(1.0) and weights[2] < weights[0]


def test_scale_initial_divides_by_the_first_loss_of_each_task() -> None:
    weigher = balancer(THREE, scale="initial", alpha=3.0)
    history = [{0: 4.0, 1: 0.5}, {0: 1.0, 1: 0.4, 2: 7.0}, {0: 1.0, 1: 0.4, 2: 14.0}]
    first, second, third = weigh_history(weigher, THREE, history)
    assert first == exactly([0.5, 0.5, 0.0])  # all are at L / L_0 = 1
    assert second == exactly(softmax({0: 3 * 0.25, 1: 3 * 0.8, 2: 3 * 1.0}, 3))
    assert third == exactly(softmax({0: 3 * 0.25, 1: 3 * 0.8, 2: 3 * 2.0}, 3))
    assert weigher.metrics()["scaled"] == pytest.approx({"a": 0.25, "b": 0.8, "c": 2.0})


def test_scale_reference_subtracts_a_given_loss() -> None:
    weigher = balancer(THREE, scale="reference", reference={"a": 2.0, "c": 1.5}, alpha=0.5)
    step = take_step(weigher, THREE, given, [batch({0: [3.0], 1: [1.0], 2: [2.0]})])
    assert step.weights == exactly(softmax({0: 0.5, 1: 0.5, 2: 0.25}, 3))


def test_a_reference_for_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"balancer\.reference names unknown tasks \['vreb'\].*'a', 'b', 'c'"):
        balancer(THREE, scale="reference", reference={"vreb": 2.0})


def test_alpha_of_theorem_3_1_as_printed() -> None:
    for step in (0, 1, 99, 1999):
        root = math.sqrt(step + 1)
        printed = 4 * root / (1.5 * 0.8) * math.log(4 * 5 * 2.5 * root / (1.5 * 0.8))
        found = theorem_alpha(step, tasks=5, radius=1.5, lipschitz=0.8, bound=2.5)
        assert found == pytest.approx(printed, rel=1e-14)
    # A bound so small that the logarithm is negative: any alpha will do, but a negative one would favour the best task.
    assert theorem_alpha(0, tasks=2, radius=10.0, lipschitz=10.0, bound=1.0) == 0.0


def test_the_schedules_of_alpha() -> None:
    objective = ToyObjective(tasks=("a", "b", "c", "far"), outside={3: 1.0})
    constant, theorem, hard = (
        balancer(objective, alpha=1.25, alpha_schedule=schedule, radius=2.0, lipschitz=0.5, bound=3.0)
        for schedule in ("constant", "theorem", "hard")
    )
    for step in (0, 7, 5000):
        assert constant.alpha(step) == 1.25
        assert hard.alpha(step) == math.inf
        # T counts the tasks of the maximum, so not the one outside it.
        assert theorem.alpha(step) == theorem_alpha(step, tasks=3, radius=2.0, lipschitz=0.5, bound=3.0)


def test_by_spread_the_unit_of_the_losses_means_nothing() -> None:
    """Softmax of standardised losses: nats, bits, and a constant beside them give the same weights."""
    losses = [2.5, 4.0, 3.25]
    mean = math.fsum(losses) / 3
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / 3)
    expected = softmax({t: 1.5 * loss / deviation for t, loss in enumerate(losses)}, 3)
    for factor, shift in ((1.0, 0.0), (1e-3, 0.0), (50.0, -7.0)):
        weigher = balancer(THREE, alpha=1.5, alpha_schedule="spread")
        taken = take_step(weigher, THREE, given, [batch({t: [factor * one + shift] for t, one in enumerate(losses)})])
        assert taken.weights == pytest.approx(expected, rel=1e-9)
        assert weigher.metrics()["alpha"] == pytest.approx(1.5 / (factor * deviation))


def test_by_spread_only_the_tasks_that_take_part_count() -> None:
    eligible = torch.tensor([True, False, True])
    losses = torch.tensor([1.0, math.nan, 2.0], dtype=torch.float64)
    assert float(spread_alpha(losses, 1.0, eligible)) == pytest.approx(2.0)  # they are half a unit from their mean
    assert float(spread_alpha(losses, 1.0, torch.tensor([True, False, False]))) == 0.0
    assert float(spread_alpha(torch.ones(3, dtype=torch.float64), 1.0, torch.ones(3, dtype=torch.bool))) == 0.0
