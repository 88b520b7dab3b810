"""The order in which hooks are called, their metrics and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, Hooks, StepContext

THREE = ToyObjective(tasks=("a", "b", "c"))


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
    ctx = take_step(balancer(THREE, "uniform"), THREE, given, [batch({0: [1.0, 3.0, 2.0], 1: [7.0]})]).ctx
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
    with pytest.raises(ValueError, match=r"checkpoint has the hooks .* this run has"):
        hooks.load_state_dict(state)
