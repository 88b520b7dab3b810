"""Invariant 3 with each balancer: a run that is stopped and resumed is the run that was not, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import save_checkpoint
from tests.synthetic import ADVERB, Layout, RecordingTrainer, small_config, trainer_for
from trp_scale.checkpoint.manager import load
from trp_scale.distributed.groups import ALONE

BALANCING: dict[str, dict[str, Any]] = {
    "group_dro": {"kind": "group_dro", "rate": 0.3},
    "uncertainty": {"kind": "uncertainty", "lr": 0.05},
    "dwa": {"kind": "dwa", "interval_steps": 1},
    "gradnorm": {"kind": "gradnorm", "lr": 0.05},
}
HALF = 3


def trainer_with(balancing: str) -> RecordingTrainer:
    layout = Layout(micro_size=4)
    trainer = trainer_for(
        layout,
        small_config(layout, balancer=BALANCING[balancing], model={"layers": 1, "dropout": 0.1}),
        absent=lambda step: (ADVERB,) if step in (0, 4) else (),
    )
    trainer.engine.train(True)
    return trainer


def take_steps(trainer: RecordingTrainer) -> None:
    for _ in range(HALF):
        trainer.train_step()


@pytest.mark.parametrize("balancing", BALANCING)
def test_a_resumed_run_is_the_uninterrupted_one(balancing: str, tmp_path: Path) -> None:
    whole = trainer_with(balancing)
    take_steps(whole)
    save_checkpoint(
        tmp_path,
        step=HALF,
        engine=whole.engine,
        hooks_state=whole.hooks.state_dict(),
        cursors={"train": whole.source.cursor},
        group=ALONE,
    )
    take_steps(whole)
    resumed = trainer_with(balancing)
    loaded = load(tmp_path / "checkpoints" / f"step_{HALF:08d}", engine=resumed.engine, group=ALONE)
    resumed.hooks.load_state_dict(loaded.hooks)
    resumed.state.step, resumed.source.cursor = loaded.step, loaded.cursors["train"]
    take_steps(resumed)
    weights, expected = resumed.engine.full_weights(), whole.engine.full_weights()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert [stats.task_weights for stats in resumed.history] == [stats.task_weights for stats in whole.history[HALF:]]
    assert resumed.hooks.metrics() == whole.hooks.metrics()
