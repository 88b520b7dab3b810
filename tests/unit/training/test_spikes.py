"""What is a spike, and what is not."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from trp_scale.config import ReliabilityConfig
from trp_scale.core.batch import StepStats
from trp_scale.training.spikes import AT_LEAST, WINDOW, SpikeWatch


def stats(loss: float, norm: float = 1.0, tasks: tuple[float, ...] = (2.0, 3.0), applied: bool = True) -> StepStats:
    return StepStats(
        applied=applied,
        grad_norm=norm,
        loss=loss,
        lr=0.1,
        task_losses=tasks,
        task_counts=tuple(float(t > 0) for t in tasks),
    )


def watch(kind: str = "skip", **settings: float) -> SpikeWatch:
    return SpikeWatch(ReliabilityConfig(spikes=kind, **settings), ("noun", "verb"))  # type: ignore[arg-type]


STEPS = 60


def settled(found: SpikeWatch, steps: int = STEPS) -> SpikeWatch:
    """After steps, from 1, of a loss that falls from 9 to 6, with noise of 5 %."""
    draw = random.Random(0)
    for step in range(steps):
        noise = [math.exp(draw.gauss(0, 0.05)) for _ in range(4)]
        level = 9 - 3 * step / steps
        assert found.judge(step + 1, stats(level * noise[0], noise[1], (level * noise[2], level * noise[3]))) == []
    return found


@pytest.mark.parametrize(
    ("spoilt", "names"),
    [
        (stats(6000.0), ["loss"]),
        (stats(6.5, norm=400.0), ["grad_norm"]),
        (stats(6.5, tasks=(7.0, 900.0)), ["loss of verb"]),
        (stats(90.0, 50.0, (6.0, 90.0)), ["loss", "grad_norm", "loss of verb"]),
        (stats(8.5, 1.3, (7.5, 7.0)), []),
        (stats(0.001), []),
        (stats(6.5, tasks=(0.0, 7.0)), []),
        (stats(math.nan, math.inf, applied=False), []),
    ],
)
def test_what_is_one(spoilt: StepStats, names: list[str]) -> None:
    found = settled(watch()).judge(STEPS + 1, spoilt)
    assert [each.name for each in found] == names
    assert all(each.score > 10 and each.value > 2 * each.usual for each in found)


def test_nothing_is_judged_before_enough_is_known() -> None:
    early = watch()
    for step in range(1, AT_LEAST + 1):  # the last of them is not in the next one's past
        early.judge(step, stats(6.0))
    assert early.judge(AT_LEAST + 1, stats(6e6)) == []
    early = watch()
    for step in range(1, AT_LEAST + 2):
        early.judge(step, stats(6.0))
    assert early.judge(AT_LEAST + 2, stats(6e6))


def test_a_spike_is_not_remembered_and_a_new_level_is() -> None:
    found = settled(watch())
    before = found.state()
    assert found.judge(STEPS + 1, stats(6000.0)) and found.state() == before
    assert found.judge(STEPS + 2, stats(math.nan, applied=False)) == [] and found.state() == before
    last = STEPS + 3 + WINDOW
    for step in range(STEPS + 3, last + 1):
        found.judge(step, stats(11.0, tasks=(11.0, 11.0)))
    assert found.judge(last + 1, stats(21.0, tasks=(11.0, 11.0))) == [], "not twice the median"
    assert found.judge(last + 2, stats(23.0, tasks=(11.0, 11.0)))


@pytest.mark.parametrize(("kind", "acts"), [("warn", False), ("skip", True), ("rollback", True)])
def test_limits_are_what_the_judge_goes_by(kind: str, acts: bool) -> None:
    found = settled(watch(kind))
    limits = found.limits(STEPS + 1)
    assert (limits is not None) == acts
    if limits is not None:
        loss, norm, *tasks = limits.tolist()
        assert found.judge(STEPS + 1, stats(loss * 0.99, norm * 0.99, tuple(each * 0.99 for each in tasks))) == []
        found = settled(watch(kind))
        assert len(found.judge(STEPS + 1, stats(loss * 1.01, norm * 1.01, tuple(each * 1.01 for each in tasks)))) == 4
    unknown = watch("skip").limits(1)
    assert unknown is not None and bool(torch.isinf(unknown).all())


def test_limits_are_the_same_whether_the_step_before_has_been_read_or_not() -> None:
    """A step is decided before its predecessor's numbers are read, but for a checkpoint between them."""
    found, step = settled(watch()), STEPS + 2
    unread = found.limits(step)
    found.judge(STEPS + 1, stats(11.0, 1.5, (11.0, 11.0)))
    read = found.limits(step)
    assert unread is not None and read is not None and unread.tolist() == read.tolist()
    after = found.limits(step + 1)
    assert after is not None and after.tolist() != read.tolist()
    for number in range(step, step + 2 * WINDOW):  # full, so that what is remembered pushes something out
        before = found.limits(number + 1)
        found.judge(number, stats(11.0 + number / 1000))
        behind = found.limits(number + 1)
        assert before is not None and behind is not None and before.tolist() == behind.tolist()


def test_it_goes_on_where_it_was() -> None:
    whole, broken = watch(), watch()
    for half in (whole, broken):
        settled(half, 50)
    resumed = watch()
    resumed.load(json.loads(json.dumps(broken.state())))
    for number in range(20):
        whole.judge(51 + number, stats(6 + number / 10))
        resumed.judge(51 + number, stats(6 + number / 10))
    assert json.dumps(resumed.state()) == json.dumps(whole.state())
    resumed.load({})
    assert resumed.state() == watch().state()
