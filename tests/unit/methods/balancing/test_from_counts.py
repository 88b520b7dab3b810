"""Uniform and proportional weights, and the order in which hooks are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, Hooks, StepContext

THREE = ToyObjective(tasks=("a", "b", "c"))
OUTSIDE = ToyObjective(tasks=("a", "b", "c", "far"), outside={3: 0.4})
UNEVEN = {0: [1.0, 3.0, 2.0], 1: [7.0]}
SPLITS = [[batch(UNEVEN)], [batch({0: [1.0]}), batch({0: [3.0, 2.0], 1: [7.0]})]]


@pytest.mark.parametrize("window", SPLITS, ids=["together", "split"])
def test_uniform_is_the_mean_of_the_means_of_the_tasks_present(window: list[Batch]) -> None:
    step = take_step(balancer(THREE, "uniform"), THREE, given, window)
    assert step.weights == [0.5, 0.5, 0.0]
    assert sum(step.totals) == pytest.approx((2.0 + 7.0) / 2, rel=1e-14)


def test_uniform_with_the_papers_total_is_one_over_all_tasks() -> None:
    """Eq. 4: 1/T each, whoever is absent."""
    step = take_step(balancer(THREE, "uniform", total="paper"), THREE, given, SPLITS[0])
    assert step.weights == pytest.approx([1 / 3, 1 / 3, 0.0], abs=1e-15)
    assert sum(step.totals) == pytest.approx((2.0 + 7.0) / 3, rel=1e-14)


@pytest.mark.parametrize(("total", "expected"), [("paper", [1.0, 1.0, 0.0]), ("1", [0.5, 0.5, 0.0])])
def test_the_uniform_sum_is_one_for_each_task_only_with_the_papers_total(total: str, expected: list[float]) -> None:
    """MultiMAE: the sum of the losses of the tasks that are there."""
    weigher = balancer(THREE, "uniform", total=total, form="sum")
    assert take_step(weigher, THREE, given, SPLITS[0]).weights == expected
    # Elements of equal weight count the same whatever the weights sum to: 3 and 1 elements at equal task weights.
    assert weigher.metrics()["effective_elements"] == pytest.approx(4 / (1 / 3 + 1), rel=1e-14)


@pytest.mark.parametrize("total", ["1", "paper"])
def test_uniform_with_all_tasks_present_is_the_same_for_both_totals(total: str) -> None:
    step = take_step(balancer(THREE, "uniform", total=total), THREE, given, [batch({0: [1.0], 1: [1.0], 2: [1.0] * 5})])
    assert step.weights == pytest.approx([1 / 3] * 3, abs=1e-15)


@pytest.mark.parametrize("window", SPLITS, ids=["together", "split"])
def test_proportional_is_the_mean_over_all_elements(window: list[Batch]) -> None:
    step = take_step(balancer(THREE, "proportional"), THREE, given, window)
    assert step.weights == [0.75, 0.25, 0.0]
    assert sum(step.totals) == pytest.approx((1 + 3 + 2 + 7) / 4, rel=1e-14)


@pytest.mark.parametrize(("kind", "expected"), [("uniform", [0.5, 0.5]), ("proportional", [0.75, 0.25])])
def test_a_task_outside_takes_no_share_of_the_balanced_weights(kind: str, expected: list[float]) -> None:
    step = take_step(balancer(OUTSIDE, kind), OUTSIDE, given, [batch(UNEVEN | {3: [9.0] * 100})])
    assert step.weights == [*expected, 0.0, 0.4]


@pytest.mark.parametrize("kind", ["uniform", "proportional", "minimax"])
def test_without_any_balanced_element_the_rest_still_counts(kind: str) -> None:
    step = take_step(balancer(OUTSIDE, kind), OUTSIDE, given, [batch({3: [2.0, 4.0]})])
    assert step.weights == [0.0, 0.0, 0.0, 0.4]
    assert sum(step.totals) == pytest.approx(0.4 * 3.0, rel=1e-14)


class Recorder(Hook):
    """Writes down what it is asked."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls
        self.state: Mapping[str, Any] = {}

    def before_step(self, ctx: StepContext) -> None:
        self.calls.append(f"{self.name} before_step")

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        self.calls.append(f"{self.name} batch")
        return batch({0: [float(micro["inputs"][0]) * 10 + len(self.name)]})

    def gradients(self, ctx: StepContext) -> None:
        self.calls.append(f"{self.name} gradients")

    def after_step(self, ctx: StepContext) -> None:
        self.calls.append(f"{self.name} after_step {ctx.stats().applied}")

    def metrics(self) -> Mapping[str, Any]:
        return {"calls": len(self.calls)} if self.name == "loud" else {}

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state


def recorded() -> tuple[Hooks, list[Recorder], list[str]]:
    calls: list[str] = []
    recorders = [Recorder("loud", calls), Recorder("silent", calls)]
    return Hooks(balancer(THREE, "uniform"), recorders), recorders, calls


def test_every_hook_is_called_in_order_and_each_sees_what_the_one_before_made_of_the_batch() -> None:
    hooks, _, calls = recorded()
    ctx = take_step(balancer(THREE, "uniform"), THREE, given, SPLITS[0]).ctx
    hooks.before_step(ctx)
    assert float(hooks.batch(ctx, batch({0: [1.0]}))["inputs"]) == (1 * 10 + 4) * 10 + 6
    hooks.gradients(ctx)
    ctx.decide(torch.tensor(torch.nan))
    hooks.after_step(ctx)
    assert calls == [
        *("loud before_step", "silent before_step", "loud batch", "silent batch"),
        *("loud gradients", "silent gradients", "loud after_step False", "silent after_step False"),
    ]


def test_hooks_with_nothing_to_say_leave_no_metrics() -> None:
    hooks, _, _ = recorded()
    assert set(hooks.metrics()) == {"loud", "balancer"}


def test_state_goes_to_the_hook_it_came_from() -> None:
    hooks, recorders, _ = recorded()
    state = hooks.state_dict()
    assert set(state) == {"loud", "silent", "balancer"}
    hooks.load_state_dict(state)
    assert [recorder.state for recorder in recorders] == [{"kept": "loud"}, {"kept": "silent"}]


@pytest.mark.parametrize("change", [{"stranger": {}}, None])
def test_state_of_other_hooks_is_refused(change: dict[str, Any] | None) -> None:
    hooks, _, _ = recorded()
    state = hooks.state_dict()
    state = state | change if change else {"loud": state["loud"]}
    with pytest.raises(ValueError, match=r"checkpoint holds the hooks .* this run has"):
        hooks.load_state_dict(state)
