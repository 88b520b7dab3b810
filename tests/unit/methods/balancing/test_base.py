"""State of all balancers: through a checkpoint bit for bit, and over skipped steps; and those that read no losses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.grids import grid
from tests.unit.methods.balancing.branching import Branching, BranchingObjective, elements, window
from tests.unit.methods.balancing.toy import ToyObjective, balancer, batch, given, take_step
from trp_scale.checkpoint.document import join_state, split_state
from trp_scale.core.batch import Batch
from trp_scale.methods.balancing.base import TaskAdam, TaskBalancer

OBJECTIVE = BranchingObjective(tasks=("a", "b", "c", "far"), outside={3: 0.3})
ABSENT: Mapping[int, tuple[int, ...]] = {0: (2,), 3: (1,), 5: (0, 2)}
STEPS = 8

SETTINGS: dict[str, dict[str, Any]] = {
    "minimax lagged": {"kind": "minimax", "estimate": "lagged"},
    "minimax hard": {"kind": "minimax", "estimate": "lagged", "alpha_schedule": "hard"},
    "minimax spread": {"kind": "minimax", "estimate": "lagged", "alpha_schedule": "spread", "loss_ema": 0.9},
    "minimax smoothed": {"kind": "minimax", "loss_ema": 0.5, "alpha": 2.0},
    "minimax scaled": {"kind": "minimax", "scale": "initial"},
    "minimax micro": {"kind": "minimax", "estimate": "micro", "scale": "initial"},
    "group_dro": {"kind": "group_dro", "rate": 0.5},
    "group_dro lagged": {"kind": "group_dro", "estimate": "lagged", "loss_ema": 0.5, "scale": "initial"},
    "group_dro micro": {"kind": "group_dro", "estimate": "micro", "adjustment": 1.0, "group_sizes": "batch"},
    "uncertainty": {"kind": "uncertainty", "lr": 0.05},
    "uncertainty scaled": {"kind": "uncertainty", "form": "kendall", "scale": "initial"},
    "famo": {"kind": "famo", "lr": 0.5, "loss_ema": 0.5},
    "famo lagged": {"kind": "famo", "lr": 0.5, "estimate": "lagged", "scale": "reference", "reference": {"a": 0.5}},
    "famo micro": {"kind": "famo", "lr": 0.5, "estimate": "micro"},
    "stch": {"kind": "stch", "form": "logarithms", "scale": "initial"},
    "stch lagged": {"kind": "stch", "mu": 0.3, "estimate": "lagged", "preference": {"b": 2.0}},
    "dwa": {"kind": "dwa", "interval_steps": 2},
    "dwa reference": {"kind": "dwa", "interval_steps": 1, "scale": "reference", "reference": {"a": 0.5}},
    "gradnorm": {"kind": "gradnorm"},
    "jd": {"kind": "jd"},
    "jd mgda": {"kind": "jd", "method": "mgda", "at": "representation"},
    "jd pcgrad": {"kind": "jd", "method": "pcgrad"},
    "jd imtl_g": {"kind": "jd", "method": "imtl_g"},
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


@pytest.mark.parametrize(("name", "done"), grid(SETTINGS, [1, 3, 5]))
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


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"minimax hard"}))  # whose alpha is infinite
def test_metrics_are_json_values_under_names_of_tasks(name: str) -> None:
    weigher = balancer(OBJECTIVE, **SETTINGS[name])
    json.dumps(weigher.metrics(), allow_nan=True)  # before any step
    go_on(weigher, range(STEPS))
    found = weigher.metrics()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kind"] == SETTINGS[name]["kind"] and found["effective_elements"] > 0
    by_task = [value for value in found.values() if isinstance(value, dict)]
    assert all(list(values) == ["a", "b", "c"] for values in by_task)


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


BESIDE = ToyObjective(tasks=("a", "b", "c", "beside"), outside={3: 0.4})
ALL = {0: [1.0], 1: [2.0], 2: [3.0], 3: [1.0]}


def random_weights(step: int, elements: dict[int, list[float]] = ALL, **settings: float) -> list[float]:
    return take_step(balancer(BESIDE, "random", **settings), BESIDE, given, [batch(elements)], step=step).weights


def test_random_weights_of_present_tasks_sum_to_one_beside_the_others() -> None:
    for step in range(20):
        found = random_weights(step)
        assert sum(found[:3]) == pytest.approx(1.0, rel=1e-14) and min(found[:3]) > 0 and found[3] == 0.4
        absent = random_weights(step, {0: [1.0], 2: [3.0]})
        assert absent[1] == 0.0 and sum(absent[:3]) == pytest.approx(1.0, rel=1e-14)
        assert absent[0] / absent[2] == pytest.approx(found[0] / found[2], rel=1e-12), "the same draws"
    assert random_weights(0, {3: [1.0]}) == [0.0, 0.0, 0.0, 0.4]


def test_random_weights_follow_from_seed_and_step_alone() -> None:
    again = balancer(BESIDE, "random")
    assert take_step(again, BESIDE, given, [batch(ALL)], step=7).weights == random_weights(7) != random_weights(8)
    assert again.state_dict() == {}, "a resumed run draws as the whole one did"
    again.run.config.training.seed = 1
    assert take_step(again, BESIDE, given, [batch(ALL)], step=7).weights != random_weights(7)


def test_random_draws_are_standard_normal() -> None:
    """The log-ratio of two weights is the difference of two draws over the temperature: variance 2 / temperature^2."""
    count, temperature = 500, 0.5
    pairs = [random_weights(step, temperature=temperature) for step in range(count)]
    ratios = np.array([math.log(found[0] / found[1]) for found in pairs])
    deviation = math.sqrt(2.0) / temperature
    assert abs(ratios.mean()) < 4 * deviation / math.sqrt(count)
    assert ratios.std() == pytest.approx(deviation, rel=4 / math.sqrt(2 * count))


def test_task_adam_is_torch_s_where_tasks_are_present() -> None:
    """A task that is absent in a step keeps its value, moments and step count, as one without a gradient does."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, dtype=torch.float64, generator=generator)
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    theirs, ours = torch.optim.Adam(parameters, lr=0.1), TaskAdam(torch.zeros(3, dtype=torch.float64), lr=0.1)
    for step in range(12):
        gradient = torch.randn(3, dtype=torch.float64, generator=generator)
        present = torch.tensor([True, step % 3 != 1, step > 4])
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient[number].clone() if present[number] else None
        theirs.step()
        values = ours.step(values, gradient, present)
        if step == 6:  # through a checkpoint
            state, ours = ours.state_dict(), TaskAdam(torch.zeros(3, dtype=torch.float64), lr=0.1)
            ours.load_state_dict(state)
        expected = torch.stack([parameter.detach() for parameter in parameters])
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
