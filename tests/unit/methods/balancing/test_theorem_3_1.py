"""TRP Theorem 3.1 as printed, on a problem where uniform weights and alpha = 1 break its bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.methods.balancing.toy import ClosedForm, balancer, descend
from trp_scale.methods.balancing.global_losses import softmax_weights, theorem_alpha

# f_t = |x - b_t| on [-1, 1]: the maximum 1 + |x| is least at 0. From 1 or -1, R0 = 1; slopes are 1; no loss exceeds 2.
CENTRES = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
RADIUS, LIPSCHITZ, BOUND, STEPS = 1.0, 1.0, 2.0, 500
PROMISED = 2 * RADIUS * LIPSCHITZ / math.sqrt(STEPS)  # 0.0894
DISTANCES = ClosedForm(lambda x: (x - CENTRES).abs(), len(CENTRES))


def gap(start: float, kind: str = "minimax", **settings: Any) -> float:
    """max_t f_t at the average of the K points, above its least value."""
    if kind == "minimax":
        settings = {"radius": RADIUS, "lipschitz": LIPSCHITZ, "bound": BOUND, **settings}
    weigher = balancer(DISTANCES, kind, **settings)
    rate = RADIUS / (LIPSCHITZ * math.sqrt(STEPS))
    path = descend(DISTANCES, weigher, [start], steps=STEPS, rate=lambda step: rate)
    return DISTANCES.worst(path.points.mean(0)) - 1.0


def test_the_alpha_of_the_theorem_keeps_its_bound() -> None:
    """From either side."""
    found = gap(1.0, alpha_schedule="theorem")
    assert gap(-1.0, alpha_schedule="theorem") <= PROMISED and found <= PROMISED
    assert found == pytest.approx(0.0186, abs=0.001)


def test_the_alpha_of_the_theorem_comes_as_near_the_maximum_as_its_proof_needs() -> None:
    """Supplement B.1.1: sum_t w_t f_t >= max_t f_t - R0 L' / (2 sqrt(k + 1)) for any losses within [0, B]."""
    generator = torch.Generator().manual_seed(0)
    tasks, radius, lipschitz, bound = 6, 3.0, 2.0, 4.0
    everyone = torch.ones(tasks, dtype=torch.bool)
    tightest = 0.0
    for step in (0, 1, 10, 100, 1000, 100_000):
        alpha = theorem_alpha(step, tasks=tasks, radius=radius, lipschitz=lipschitz, bound=bound)
        allowed = radius * lipschitz / (2 * math.sqrt(step + 1))
        for _ in range(100):
            # Losses close to the worst one are the hard case; spread them on all scales.
            spread = 10 ** float(torch.empty(()).uniform_(-6, 0, generator=generator))
            losses = bound * (1 - spread * torch.rand(tasks, generator=generator, dtype=torch.float64))
            missed = float(losses.max() - softmax_weights(losses, alpha, everyone) @ losses)
            assert missed <= allowed
            tightest = max(tightest, missed / allowed)
    assert tightest > 0.01, "the losses tried would not notice a smaller alpha"
