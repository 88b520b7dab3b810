"""Minimax weights, an adversary and learned masks in one run: the same on ZeRO-2 as on one process.

tests/distributed/test_learned_masks_resume.py stops such a run and resumes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.grids import always
from tests.parity.compare import RELATIVE, TRAVELLED, steps_too_far, too_far
from tests.parity.test_learned_masks import ROUNDING, network_of
from tests.ranks import Ranks
from tests.synthetic import Layout
from tests.synthetic_masks import MasksResult, run_masks

STEPS = 6
ZERO2 = Layout(engine="deepspeed", stage=2, micro_size=2)


def changes(estimate: str, update: str) -> dict[str, Any]:
    return {
        "training": {"steps": STEPS},
        "vision": {"tokens": "all"},
        "balancer": {"kind": "minimax", "estimate": estimate, "alpha": 4.0},
        "adversary": {"kind": "absolute_embedding", "ascent": "sgd", "lr": 10.0, "eps": 0.3, "update": update},
        "optimizer": {"lr": 3e-3, **ROUNDING["optimizer"]},
        "multilevel": {"unroll": 2, **ROUNDING["multilevel"]},
    }


def differences(ours: MasksResult, theirs: MasksResult) -> list[str]:
    found = [*too_far(ours, theirs), *too_far(network_of(ours), network_of(theirs), skip_key_biases=False)]
    pairs = {"adversary": (ours.vector, theirs.vector)}
    pairs |= {f"head {name}": (ours.head[name]["value"], theirs.head[name]["value"]) for name in theirs.head}
    for name, (mine, other) in pairs.items():
        apart = float((mine - other).norm() / other.norm())
        if apart > max(RELATIVE, TRAVELLED):
            found.append(f"{name}: {apart:.1e} of its norm")
    return found


@pytest.mark.parametrize(
    ("estimate", "update"), always([("exact", "parallel"), ("lagged", "sequential")], ("lagged", "sequential"))
)
def test_all_three_on_zero_2_are_those_of_one_process(two_ranks: Ranks, estimate: str, update: str) -> None:
    theirs = run_masks(Layout(micro_size=2), changes(estimate, update), halves=True)
    ours = two_ranks(run_masks, ZERO2, changes(estimate, update), halves=True)[0]
    assert differences(ours, theirs) == []
    assert steps_too_far(ours, theirs, names=["task_weights"]) == []
    assert abs(theirs.steps[-1].task_weights[0] - 0.5) > 1e-4
    assert float(theirs.vector.abs().max()) > 0.01
    assert all(not torch.equal(value, theirs.network_initial[name]) for name, value in theirs.network.items())
