"""What every balancer that reads losses remembers: through a checkpoint bit for bit, and over skipped steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.unit.methods.balancing.branching import Branching, BranchingObjective, elements, window
from tests.unit.methods.balancing.toy import balancer, take_step
from trp_scale.checkpoint.document import join_state, split_state
from trp_scale.methods.balancing.base import TaskBalancer

OBJECTIVE = BranchingObjective(tasks=("a", "b", "c", "far"), outside={3: 0.3})
ABSENT: Mapping[int, tuple[int, ...]] = {0: (2,), 3: (1,), 5: (0, 2)}
STEPS = 8

SETTINGS: dict[str, dict[str, Any]] = {
    "group_dro": {"kind": "group_dro", "rate": 0.5},
    "group_dro lagged": {"kind": "group_dro", "estimate": "lagged", "loss_ema": 0.5, "scale": "initial"},
    "group_dro micro": {"kind": "group_dro", "estimate": "micro", "adjustment": 1.0, "group_sizes": "batch"},
    "uncertainty": {"kind": "uncertainty", "lr": 0.05},
    "uncertainty scaled": {"kind": "uncertainty", "form": "kendall", "scale": "initial"},
    "dwa": {"kind": "dwa", "interval_steps": 2},
    "dwa reference": {"kind": "dwa", "interval_steps": 1, "scale": "reference", "reference": {"a": 0.5}},
    "gradnorm": {"kind": "gradnorm"},
    "gradnorm representation": {"kind": "gradnorm", "at": "representation", "total": "paper"},
}


def go_on(weigher: TaskBalancer, steps: range) -> list[list[float]]:
    """Weights of these steps; the model stays as it is, since a loss at other rows is another loss."""
    model = Branching(4)
    found = []
    for step in steps:
        parts = window(elements(step, ABSENT, 4), 3)
        found.append(take_step(weigher, OBJECTIVE, model, parts, step=step).weights)
    return found


def through_a_checkpoint(state: Mapping[str, Any], directory: Path) -> Any:
    """The state as the checkpoint's files give it back."""
    document, tensors = split_state({"balancer": state})
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "hooks")
    return join_state(json.loads(json.dumps(document)), safetensors.torch.load_file(directory / "hooks"))["balancer"]


@pytest.mark.parametrize("done", [1, 3, 5])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_restored_balancer_goes_on_bit_for_bit(name: str, done: int, tmp_path: Path) -> None:
    first, second, fresh = (balancer(OBJECTIVE, **SETTINGS[name]) for _ in range(3))
    go_on(first, range(done))
    state = first.state_dict()
    ours = go_on(first, range(done, STEPS))
    second.load_state_dict(through_a_checkpoint(state, tmp_path))  # as it was saved, whatever was done since
    assert go_on(second, range(done, STEPS)) == ours
    assert second.metrics() == first.metrics()
    assert go_on(fresh, range(done, STEPS)) != ours, "without its state it goes on in the same way"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    skipping, plain = (balancer(OBJECTIVE, **SETTINGS[name]) for _ in range(2))
    model, poison = Branching(4), Branching(4)
    poison.heads.weight.data.mul_(30.0)
    broken = Branching(4)
    broken.heads.weight.data[0, 0] = float("inf")
    for step in range(STEPS):
        parts = window(elements(step, ABSENT, 4), 3)
        for other in (poison, broken):
            take_step(skipping, OBJECTIVE, other, parts, step=step, applied=False)
        ours = take_step(skipping, OBJECTIVE, model, parts, step=step).weights
        assert ours == take_step(plain, OBJECTIVE, model, parts, step=step).weights
    assert skipping.metrics() == plain.metrics()


@pytest.mark.parametrize("name", SETTINGS)
def test_metrics_are_json_values_under_names_of_tasks(name: str) -> None:
    weigher = balancer(OBJECTIVE, **SETTINGS[name])
    json.dumps(weigher.metrics(), allow_nan=True)  # before any step
    go_on(weigher, range(STEPS))
    found = weigher.metrics()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kind"] == SETTINGS[name]["kind"] and found["effective_elements"] > 0
    by_task = [value for value in found.values() if isinstance(value, dict)]
    assert by_task and all(list(each) == ["a", "b", "c"] for each in by_task)
