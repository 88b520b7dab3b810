"""The loss scaler of fp16: an overflow moves nothing, lowers the scale, and is no fault. Run with a CPU's fp16."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.ranks import Ranks
from tests.synthetic import Layout, small_config, trainer_for
from trp_scale.engines.deepspeed import DeepSpeedEngine

STEPS = 10


def searching_run(stage: int) -> dict[str, object]:
    """From a scale that must overflow (2^24 x a loss of 5) down to one that does not."""
    accelerator, before = get_accelerator(), DeepSpeedEngine.fp16_devices
    DeepSpeedEngine.fp16_devices = ("cpu",)
    accelerator.is_fp16_supported = lambda: True  # torch's CPU kernels do have it
    try:
        document = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
        layout = Layout(engine="deepspeed", stage=stage, document=document)
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
        trainer.engine.load_extra_state({**state, "cur_scale": 512.0})
        restored = trainer.engine.extra_state()["cur_scale"]
        result = {
            "applied": [stats.applied for stats in trainer.__dict__["history"]],
            "moved": moved,
            "scales": scales,
            "faults": trainer.state.skipped,
            "steps": trainer.engine.optimizer_steps(),
            "names": set(state),
            "restored": restored,
        }
        trainer.engine.close()
        return result
    finally:
        DeepSpeedEngine.fp16_devices = before
        del accelerator.is_fp16_supported


@pytest.mark.parametrize("stage", [1, 2, 3])
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
    assert first["names"] >= {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}
    assert first["restored"] == 512.0
