"""What minimax remembers: in checkpoints, over skipped steps; and what it reports."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch

from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step
from trp_scale.core.batch import Batch

THREE = ToyObjective(tasks=("a", "b", "c"))

HISTORY: list[dict[int, list[float]]] = [
    {0: [4.0, 2.0], 1: [1.0]},
    {0: [1.0], 1: [3.0, 3.5]},
    {0: [2.0], 1: [2.0], 2: [5.0]},
    {0: [2.5], 1: [1.0], 2: [4.0]},
]

SETTINGS: list[dict[str, Any]] = [
    {"estimate": "lagged"},
    {"estimate": "lagged", "alpha_schedule": "hard"},
    {"estimate": "exact", "loss_ema": 0.5, "alpha": 2.0},
    {"estimate": "lagged", "alpha_schedule": "spread", "alpha": 2.0},
    {"estimate": "exact", "scale": "initial"},
    {"estimate": "lagged", "scale": "initial", "loss_ema": 0.9},
    {"estimate": "micro", "scale": "initial"},
]


def window(number: int) -> list[Batch]:
    return [batch(HISTORY[number])]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_restored_balancer_goes_on_bit_for_bit(settings: dict[str, Any], done: int) -> None:
    first = balancer(THREE, **settings)
    for number in range(done):
        take_step(first, THREE, given, window(number), step=number)
    second = balancer(THREE, **settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    rest = range(done, len(HISTORY))
    ours = [take_step(first, THREE, given, window(number), step=number).weights for number in rest]
    assert [take_step(second, THREE, given, window(number), step=number).weights for number in rest] == ours
    if done:  # without its state it would have gone on in another way
        fresh = balancer(THREE, **settings)
        assert [take_step(fresh, THREE, given, window(number), step=number).weights for number in rest] != ours


def test_state_is_made_of_tensors_on_the_host() -> None:
    weigher = balancer(THREE)
    take_step(weigher, THREE, given, window(0))
    state = weigher.state_dict()
    assert state and all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in state.values())
    assert state["last_losses"][:2].tolist() == [3.0, 1.0] and state["last_losses"][2].isnan()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_skipped_step_leaves_no_trace(settings: dict[str, Any]) -> None:
    skipping, plain = balancer(THREE, **settings), balancer(THREE, **settings)
    poison = [batch({0: [100.0], 1: [0.001], 2: [float("inf")]})]
    for number in range(len(HISTORY)):
        take_step(skipping, THREE, given, poison, step=number, applied=False)
        ours = take_step(skipping, THREE, given, window(number), step=number).weights
        assert ours == take_step(plain, THREE, given, window(number), step=number).weights


def test_an_applied_step_does_leave_a_trace() -> None:
    """The counterpart of the test above: the same losses, committed, change the next weights."""
    moved, plain = balancer(THREE, estimate="lagged"), balancer(THREE, estimate="lagged")
    take_step(moved, THREE, given, [batch({0: [100.0], 1: [0.001]})])
    assert take_step(moved, THREE, given, window(1)).weights != take_step(plain, THREE, given, window(1)).weights


def test_effective_elements_is_one_over_the_sum_of_squared_weights_per_element() -> None:
    objective = ToyObjective(tasks=("a", "b", "c", "far"), outside={3: 1.0})
    weigher = balancer(objective)
    assert weigher.metrics().get("effective_elements") is None  # before any step
    elements = {0: [1.0] * 40, 1: [2.0] * 5, 3: [9.0] * 1000}
    step = take_step(weigher, objective, given, [batch(elements)])
    a, b = step.weights[:2]
    assert weigher.metrics()["effective_elements"] == pytest.approx(1 / (a * a / 40 + b * b / 5), rel=1e-13)


@pytest.mark.parametrize("kind", ["uniform", "proportional"])
def test_effective_elements_of_fixed_weights(kind: str) -> None:
    weigher = balancer(THREE, kind)
    take_step(weigher, THREE, given, [batch({0: [1.0] * 30, 1: [1.0] * 10})])
    expected = {"uniform": 1 / (0.25 / 30 + 0.25 / 10), "proportional": 40.0}[kind]
    assert weigher.metrics()["effective_elements"] == pytest.approx(expected, rel=1e-13)
    assert weigher.metrics()["kind"] == kind


def test_the_interjections_of_a_usual_batch_leave_seven_effective_elements(caplog: pytest.LogCaptureFixture) -> None:
    """Two interjections among 256 x 128 pieces, at alpha = 1 and 5.5 nats against 3.3 of the others."""
    objective = ToyObjective(tasks=tuple("abcdefghi"))
    counts = [900, 1000, 350, 500, 300, 400, 600, 150]
    elements = {task: [3.3] * count for task, count in enumerate(counts)} | {8: [5.5, 5.5]}
    weigher = balancer(objective)
    take_step(weigher, objective, given, [batch(elements)])
    with caplog.at_level(logging.WARNING):
        found = weigher.metrics()["effective_elements"]
    interjections = math.exp(5.5) / (math.exp(5.5) + 8 * math.exp(3.3))  # 0.53 of the weight
    assert found == pytest.approx(2 / interjections**2, rel=0.01) == pytest.approx(7.1, abs=0.1)
    assert f"{found:.1f} effective elements" in caplog.text and "--balancer.min_count" in caplog.text


def test_the_warning_comes_only_when_few_elements_count_and_not_at_every_step(caplog: pytest.LogCaptureFixture) -> None:
    weigher = balancer(THREE)
    with caplog.at_level(logging.WARNING):
        take_step(weigher, THREE, given, [batch({0: [1.0] * 50, 1: [1.0] * 50})])
        weigher.metrics()
        assert not caplog.records
        few = [batch({0: [1.0] * 50, 1: [9.0]})]
        for step in (1, 2, 900, 1001, 1500):
            take_step(weigher, THREE, given, few, step=step)
            weigher.metrics()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 2", "step 1002"]
