"""The learning rate as a function of the step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup
from transformers import get_linear_schedule_with_warmup as linear_with_warmup

from trp_scale.config import OptimizerConfig
from trp_scale.training.loop import learning_rate

PEAK, LEAST = 2e-4, 1e-6


def rates(steps: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(**{"lr": PEAK, "min_lr": LEAST, "warmup_steps": 10, **settings})
    return [learning_rate(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "inverse_sqrt"])
def test_warm_up_rises_in_equal_parts_from_its_first_step_to_the_full_rate(schedule: str) -> None:
    found = rates(100, schedule=schedule)
    assert found[0] == pytest.approx(PEAK / 10, rel=1e-12)
    assert found[:10] == pytest.approx([PEAK * (step + 1) / 10 for step in range(10)], rel=1e-12)
    assert found[9] == pytest.approx(PEAK, rel=1e-12) and max(found) <= PEAK * (1 + 1e-12)


@pytest.mark.parametrize(("schedule", "theirs"), [("linear", linear_with_warmup), ("cosine", cosine_with_warmup)])
@pytest.mark.parametrize("warmup", [0, 1, 10, 98])
def test_decay_equals_transformers_schedule(schedule: str, theirs: Any, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = theirs(optimizer, warmup, 100)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(100, schedule=schedule, warmup_steps=warmup, min_lr=0.0)[warmup:] == pytest.approx(
        expected[warmup:], rel=1e-9
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 100])
def test_every_step_learns_without_a_least_rate(schedule: str, steps: int) -> None:
    assert min(rates(steps, schedule=schedule, warmup_steps=0, min_lr=0.0)) > 0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 98])
def test_decay_of_earlier_versions_reaches_the_least_rate_at_the_last_step(schedule: str, warmup: int) -> None:
    found = rates(100, schedule=schedule, warmup_steps=warmup, decay_end="last_step")
    assert found[warmup] == pytest.approx(PEAK, rel=1e-12)
    assert found[-1] == pytest.approx(LEAST, rel=1e-9)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[warmup:]))


def test_linear_decay_loses_the_same_at_every_step() -> None:
    found = rates(110, schedule="linear")
    losses = [earlier - later for earlier, later in itertools.pairwise(found[10:])]
    assert losses == pytest.approx([(PEAK - LEAST) / 100] * 99, rel=1e-9)


def test_cosine_decay_is_half_way_in_the_middle_and_flat_at_both_ends() -> None:
    found = rates(110, schedule="cosine")  # 100 steps of decay from step 10
    assert found[60] == pytest.approx((PEAK + LEAST) / 2, rel=1e-12)
    assert found[35] == pytest.approx(LEAST + (PEAK - LEAST) * (0.5 + 0.5 * 0.5**0.5), rel=1e-9)
    assert found[10] - found[11] < (PEAK - LEAST) / 1000 and found[-2] - found[-1] < (PEAK - LEAST) / 1000


def test_constant_stays_at_the_full_rate() -> None:
    assert rates(30, schedule="constant")[10:] == [PEAK] * 20
    assert rates(30, schedule="constant", warmup_steps=0) == [PEAK] * 30


def test_the_root_of_the_step_is_what_it_falls_with_whatever_the_length() -> None:
    found = rates(1000, schedule="inverse_sqrt")
    assert found[9:] == pytest.approx([PEAK * (10 / step) ** 0.5 for step in range(10, 1001)], rel=1e-12)
    assert rates(100, schedule="inverse_sqrt") == found[:100]
    assert rates(3, schedule="inverse_sqrt", warmup_steps=0) == pytest.approx([PEAK, PEAK / 2**0.5, PEAK / 3**0.5])
    assert rates(1000, schedule="inverse_sqrt", min_lr=PEAK / 5)[-1] == PEAK / 5


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "inverse_sqrt"])
@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (5, 8), (1, 1), (1, 1000)])
def test_a_warm_up_as_long_as_the_run_never_decays(schedule: str, steps: int, warmup: int) -> None:
    expected = [PEAK * (step + 1) / warmup for step in range(steps)]
    assert rates(steps, schedule=schedule, warmup_steps=warmup) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_one_step_of_decay_has_the_full_rate_and_in_earlier_versions_the_least(schedule: str) -> None:
    assert rates(1, schedule=schedule, warmup_steps=0) == pytest.approx([PEAK])
    assert rates(11, schedule=schedule)[-2:] == pytest.approx([PEAK, PEAK])
    assert rates(1, schedule=schedule, warmup_steps=0, decay_end="last_step") == pytest.approx([LEAST])
    assert rates(11, schedule=schedule, decay_end="last_step")[-2:] == pytest.approx([PEAK, LEAST])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_it_depends_on_the_step_alone(schedule: str) -> None:
    """Asked in any order, and again: a resumed run gets the same values."""
    config = OptimizerConfig(lr=PEAK, warmup_steps=4, schedule=schedule)  # type: ignore[arg-type]
    forwards = [learning_rate(step, 20, config) for step in range(20)]
    backwards = [learning_rate(step, 20, config) for step in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert config == OptimizerConfig(lr=PEAK, warmup_steps=4, schedule=schedule)  # type: ignore[arg-type]
