"""Invariant 1 with each balancer: the same weights, and the same state of the balancer, however the batch is split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.grids import always
from tests.parity.compare import RELATIVE, steps_too_far, too_far
from tests.parity.test_partition import sometimes_absent
from tests.ranks import Ranks
from tests.synthetic import SPLITS, TWO_RANKS, Layout, Result, small_config, trainer_for
from trp_scale.core.engine import Engine
from trp_scale.methods.balancing.gradnorm import TaskGradients

STEPS = 5
"""Adverbs are absent from the first two; with intervals of two steps DWA's weights follow losses in the last."""

BALANCING: dict[str, dict[str, Any]] = {
    "random": {"kind": "random"},
    "group_dro": {"kind": "group_dro", "rate": 0.3, "adjustment": 1.0, "group_sizes": "batch"},
    "multimae": {"kind": "uncertainty", "lr": 0.05},
    "kendall": {"kind": "uncertainty", "lr": 0.05, "form": "kendall"},
    "dwa": {"kind": "dwa", "interval_steps": 2, "temperature": 0.05, "total": "paper"},
    "famo": {"kind": "famo", "lr": 0.1},
    "stch": {"kind": "stch", "form": "logarithms", "scale": "initial", "mu": 0.1},
    "weights": {"kind": "gradnorm", "lr": 0.05},
    "jd": {"kind": "jd", "method": "aligned_mtl"},
    "jd representation": {"kind": "jd", "method": "mgda", "at": "representation"},
    "representation": {"kind": "gradnorm", "lr": 0.05, "at": "representation", "total": "paper"},
}


def run(layout: Layout, balancing: str) -> tuple[Result, dict[str, Any]]:
    """Weights and the balancer's state after a run over ten tasks, or all eleven where next sentences pass the tap."""
    objective = {"other": "task", "next_sentence": "outside" if balancing in ("weights", "jd") else "inside"}
    sections = {"balancer": BALANCING[balancing], "objective": objective, "training": {"steps": STEPS}}
    trainer = trainer_for(layout, small_config(layout, **sections), absent=sometimes_absent)
    return trainer.result(), trainer.hooks.balancer.state_dict()


@lru_cache
def reference(balancing: str) -> tuple[Result, dict[str, Any]]:
    """Plain, accumulation 4."""
    return run(Layout(micro_size=2), balancing)


def tensors(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from tensors(value, f"{path}{name}/")
        else:
            yield path + name, torch.as_tensor(value, dtype=torch.float64)


def differences(ours: tuple[Result, dict[str, Any]], balancing: str) -> list[str]:
    """What of weights, task weights and state is further apart than allowed."""
    theirs = reference(balancing)
    found = too_far(ours[0], theirs[0])
    expected = dict(tensors(theirs[1]))
    for name, value in tensors(ours[1]):
        if not torch.allclose(value, expected.pop(name), rtol=RELATIVE, atol=1e-9, equal_nan=True):
            found.append(f"state {name}")
    found += [f"no state {name}" for name in expected]
    return found + steps_too_far(ours[0], theirs[0], names=["task_weights"])


@pytest.mark.parametrize("balancing", always(BALANCING, "kendall"))
def test_accumulation_changes_neither_weights_nor_balancer(balancing: str) -> None:
    last = reference(balancing)[0].steps[-1].task_weights
    first = reference(balancing)[0].steps[2].task_weights  # of the same tasks as the next ones
    assert max(abs(a / b - 1) for a, b in zip(last, first, strict=True) if a and b) > 0.05, "the weights hardly moved"
    for split in ("accumulation 1", "accumulation 2"):
        assert differences(run(SPLITS[split], balancing), balancing) == []


@pytest.mark.parametrize(
    ("balancing", "layout"),
    always(
        product(BALANCING, TWO_RANKS),
        *((name, ("ddp", "zero2", "fsdp")[number % 3]) for number, name in enumerate(BALANCING)),
    ),
)
def test_two_ranks_give_the_weights_and_the_balancer_of_one(two_ranks: Ranks, balancing: str, layout: str) -> None:
    first, second = two_ranks(run, TWO_RANKS[layout], balancing)
    assert differences(first, balancing) == []
    for (name, ours), (_, theirs) in zip(tensors(first[1]), tensors(second[1]), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), name


def norm_before_reduction(gradients: TaskGradients, engine: Engine) -> Tensor:
    """The usual mistake: each rank takes the norm of its own part, and the norms are summed."""
    gradients._fold()
    assert gradients._sums is not None
    own = torch.linalg.vector_norm(gradients._sums.flatten(1), dim=1, dtype=torch.float64)
    every = torch.zeros(len(gradients.objective.tasks), dtype=torch.float64)
    return every.index_copy(0, gradients._places, engine.reduce_hook_gradient(own))


def run_with_wrong_norms(layout: Layout, balancing: str) -> tuple[Result, dict[str, Any]]:
    with mock.patch.object(TaskGradients, "norms", norm_before_reduction):
        return run(layout, balancing)


def test_norms_taken_before_the_reduction_would_be_seen(two_ranks: Ranks) -> None:
    ours = two_ranks(run_with_wrong_norms, TWO_RANKS["fsdp"], "weights")[0]
    found = differences(ours, "weights")
    assert {"state task_weights", "task_weights of step 1"} <= set(found) and len(found) > 10
