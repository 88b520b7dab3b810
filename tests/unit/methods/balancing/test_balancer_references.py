"""Fifty steps of each balancer, weights and gradients, against its paper's method written plainly in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.methods.balancing.branching import Branching, BranchingObjective, elements, window
from tests.unit.methods.balancing.plain_references import (
    Reference,
    Seen,
    dwa,
    famo,
    gradnorm,
    grape,
    group_dro,
    stch,
    uncertainty,
)
from tests.unit.methods.balancing.toy import balancer, take_step
from trp_scale.methods.balancing.gradnorm import SMALLEST_WEIGHT

STEPS = 50
TASKS = [0, 1, 2]
OBJECTIVE = BranchingObjective(tasks=("a", "b", "c", "far"), outside={3: 0.3}, regression=(1, 3))
ABSENT: dict[int, tuple[int, ...]] = {
    **dict.fromkeys(range(9), (2,)),  # c is first seen at step 9
    **dict.fromkeys((12, 13, 40), (0, 3)),
    **dict.fromkeys(range(22, 30), (1, 2)),
    33: (0, 1, 2),
}
"""Tasks that a step's global batch lacks."""


@dataclass(kw_only=True)
class Case:
    """settings: of the balancer; reference: its plain form, made afresh; total: what the present weights are divided
    to sum to, None = nothing; close: largest relative difference."""

    settings: dict[str, Any]
    reference: Callable[[], Reference]
    total: float | None = None
    close: float = 1e-10
    extra: dict[str, Any] = field(default_factory=dict)


def gradnorm_case(at: str, total: str) -> Case:
    settings = {"kind": "gradnorm", "at": at, "lr": 0.03, "alpha": 1.2, "total": total}
    return Case(
        settings=settings,
        reference=lambda: gradnorm(TASKS, at=at, alpha=1.2, lr=0.03, smallest=SMALLEST_WEIGHT),
        total=1.0 if total == "1" else None,
        close=2e-6,  # taps are fp32
    )


def dwa_case(total: str) -> Case:
    return Case(
        settings={"kind": "dwa", "interval_steps": 6, "temperature": 0.4, "total": total},
        reference=lambda: dwa(TASKS, interval=6, temperature=0.4),
        total=1.0 if total == "1" else None,
    )


CASES = {
    "group_dro": Case(
        settings={"kind": "group_dro", "rate": 0.3, "adjustment": 0.7, "group_sizes": "batch"},
        reference=lambda: group_dro(TASKS, rate=0.3, adjustment=0.7),
    ),
    "uncertainty multimae": Case(
        settings={"kind": "uncertainty", "lr": 0.05},
        reference=lambda: uncertainty(TASKS, lr=0.05, regression=None),
    ),
    "uncertainty kendall": Case(
        settings={"kind": "uncertainty", "lr": 0.05, "form": "kendall"},
        reference=lambda: uncertainty(TASKS, lr=0.05, regression=(1,)),
    ),
    "famo": Case(
        settings={"kind": "famo", "lr": 0.1, "gamma": 0.01},
        reference=lambda: famo(TASKS, lr=0.1, gamma=0.01),
    ),
    "stch": Case(
        settings={"kind": "stch", "mu": 0.5, "preference": {"b": 2.0}},
        reference=lambda: stch(TASKS, mu=0.5, preference={0: 1.0, 1: 2.0, 2: 1.0}, logarithms=False),
    ),
    "stch logarithms": Case(
        settings={"kind": "stch", "mu": 0.5, "preference": {"c": 0.5}, "form": "logarithms", "scale": "initial"},
        reference=lambda: stch(TASKS, mu=0.5, preference={0: 1.0, 1: 1.0, 2: 0.5}, logarithms=True),
    ),
    "grape": Case(
        settings={"kind": "dwa", "interval_steps": 3, "temperature": 0.1, "accumulate": True},
        reference=lambda: grape(TASKS, interval=3, rate=10.0),
        total=1.0,
    ),
    "dwa": dwa_case("1"),
    "dwa paper": dwa_case("paper"),
    "gradnorm weights": gradnorm_case("weights", "1"),
    "gradnorm representation": gradnorm_case("representation", "paper"),
}


def plainly(case: Case, reference: Reference, model: Branching, step: int) -> tuple[Tensor, Tensor]:
    """Weights [T] and gradient of a step, in one batch."""
    fields = elements(step, ABSENT, 4)
    out = model(fields["inputs"], fields["task"])
    here = {t: fields["task"] == t for t in range(4)}
    losses = {t: out.losses[mask].mean() for t, mask in here.items() if mask.any()}
    counts = {t: int(mask.sum()) for t, mask in here.items()}
    balanced = {t: loss for t, loss in losses.items() if t in TASKS}
    seen = Seen(step=step, model=model, out=out, losses=balanced, counts=counts)
    found = reference(seen) if balanced else {}
    whole = sum(found.values()) if case.total is not None else 1.0
    weights = {t: weight / whole for t, weight in found.items()} | {3: 0.3}
    model.zero_grad()
    sum((weight * losses[t] for t, weight in weights.items() if t in losses), torch.zeros(())).backward()
    return torch.tensor([weights.get(t, 0.0) for t in range(4)], dtype=torch.float64), gradient(model)


def gradient(model: Branching) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def descend(model: Branching) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.02 * parameter.grad


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_are_those_of_the_plain_method(name: str, micro_batches: int) -> None:
    case = CASES[name]
    ours = Branching(4)
    theirs = copy.deepcopy(ours)
    weigher, reference = balancer(OBJECTIVE, **case.settings), case.reference()
    seen = []
    for step in range(STEPS):
        ours.zero_grad()
        parts = window(elements(step, ABSENT, 4), micro_batches)
        taken = take_step(weigher, OBJECTIVE, ours, parts, step=step)
        weights, expected = plainly(case, reference, theirs, step)
        assert taken.weights == pytest.approx(weights.tolist(), rel=case.close, abs=1e-15), step
        assert (gradient(ours) - expected).norm() <= case.close * expected.norm(), step
        descend(ours)
        descend(theirs)
        seen.append(weights[:3])
    moved = torch.stack([weights for weights in seen if (weights > 0).all()])
    assert (moved.max(0).values / moved.min(0).values).max() > 1.1, "the weights hardly moved: agreement means little"
