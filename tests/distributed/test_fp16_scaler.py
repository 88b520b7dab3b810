"""The loss scaler of fp16: an overflow moves nothing, lowers the scale, and is no fault. Run with a CPU's fp16."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.engine_probe import Probe
from tests.distributed.half_precision import fp16_layout, fp16_on_a_cpu
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import small_config, trainer_for

STEPS = 10
NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def searching_run(stage: int) -> dict[str, object]:
    """From a scale that must overflow (2^24 x a loss of 5) down to one that does not."""
    with fp16_on_a_cpu():
        layout = fp16_layout(stage, initial_scale_power=24)
        config = small_config(layout, training={"precision": "fp16", "steps": STEPS, "max_skipped_steps": 0})
        trainer = trainer_for(layout, config)
        scales, moved, weights = [], [], trainer.engine.full_weights()
        for _ in range(STEPS):
            trainer.train_step()
            now = trainer.engine.full_weights()
            moved.append(any(not torch.equal(now[name], weights[name]) for name in now))
            weights = now
            scales.append(trainer.engine.extra_state()["cur_scale"])
        state = dict(trainer.engine.extra_state())
        # As a checkpoint of another stage has it: all names, of which stage 0 lacks one.
        trainer.engine.load_extra_state({**dict.fromkeys(NAMES, 1.0), "cur_scale": 512.0})
        restored = dict(trainer.engine.extra_state())
        result = {
            "applied": [stats.applied for stats in trainer.history],
            "moved": moved,
            "scales": scales,
            "faults": trainer.state.skipped,
            "steps": trainer.engine.optimizer_steps(),
            "names": set(state),
            "restored": restored,
        }
        trainer.engine.close()
        return result


@pytest.mark.parametrize("stage", always([0, 1, 2, 3], 0, 2))
def test_the_scaler_searches_and_the_run_goes_on(two_ranks: Ranks, stage: int) -> None:
    first, second = two_ranks(searching_run, stage)
    assert first["applied"] == second["applied"] and first["scales"] == second["scales"]
    applied, scales = first["applied"], first["scales"]
    assert isinstance(applied, list) and isinstance(scales, list)
    assert not applied[0], "the first scale was meant to overflow"
    assert applied[-1], "no scale was found"
    assert first["moved"] == applied, "what is skipped moves nothing, what is applied moves"  # on rank 0: whole weights
    assert first["steps"] == sum(applied)
    for scale, lower, fine in zip(scales, scales[1:], applied[1:], strict=False):
        assert lower == scale if fine else lower < scale
    assert first["faults"] == 0
    # DeepSpeed's scaler of stage 0 has no hysteresis.
    names = NAMES if stage else NAMES[:-1]
    assert first["names"] == set(names)
    assert first["restored"] == {**dict.fromkeys(names, 1.0), "cur_scale": 512.0}


def with_a_given_scale(stage: int) -> tuple[dict[str, float], bool, dict[str, float]]:
    """The scaler's state, what a skip says, and the state after it."""
    with fp16_on_a_cpu():
        probe = Probe(fp16_layout(stage, loss_scale=128), training={"precision": "fp16"})
        before = dict(probe.engine.extra_state())
        probe.backward(0, factor=float("nan"))
        lowered, after = probe.engine.skip(), dict(probe.engine.extra_state())
        probe.engine.close()
        return before, lowered, after


@pytest.mark.parametrize("stage", [0, 1])
def test_a_scale_that_is_given_is_not_searched_for(two_ranks: Ranks, stage: int) -> None:
    for before, lowered, after in two_ranks(with_a_given_scale, stage):
        assert before["cur_scale"] == after["cur_scale"] == 128.0
        assert "last_overflow_iter" not in before
        assert not lowered, "nothing will be different at the next try: this is a fault"


def with_a_scale_that_helps_nothing(stage: int) -> list[tuple[float, bool]]:
    """The scale after each of five skips, and whether it has been lowered."""
    with fp16_on_a_cpu():
        probe = Probe(fp16_layout(stage, initial_scale_power=2), training={"precision": "fp16"})
        found = []
        for _ in range(5):
            probe.backward(0, factor=float("nan"))
            lowered = probe.engine.skip()
            found.append((probe.engine.extra_state()["cur_scale"], lowered))
        probe.engine.close()
        return found


@pytest.mark.parametrize("stage", always([0, 1, 2, 3], 0, 2))
def test_a_scale_that_cannot_be_lowered_is_a_fault(two_ranks: Ranks, stage: int) -> None:
    """Then the skipped steps count, and too many of them end the run with a checkpoint."""
    for found in two_ranks(with_a_scale_that_helps_nothing, stage):
        assert found == [(2.0, True), (1.0, True), *[(1.0, False)] * 3]
