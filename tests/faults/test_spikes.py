"""A finite loss a thousand times too large on one rank: skipped on all, or gone back from, its rows passed over."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoints import unequal
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import flags, lines, pretrain_here
from tests.synthetic import TWO_RANKS, Layout, data_group, small_config, trainer_for
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints
from trp_scale.config import ReliabilityConfig
from trp_scale.core.batch import Batch
from trp_scale.training import decisions as spikes
from trp_scale.training.decisions import SpikeWatch
from trp_scale.training.loop import Trainer
from trp_scale.training.rundir import read_incidents

LAYOUTS = {"plain": Layout(), **TWO_RANKS}
SPOILT = 7
"""Step, from 0."""
SCORE = {"reliability__spike_score": 30.0}


@mock.patch.object(spikes, "AT_LEAST", 4)
def run(layout: Layout, action: str) -> tuple[list[bool], float]:
    """Which of ten steps were applied, and how far the weights moved in the spoilt one."""
    config = small_config(layout, training={"steps": 10}, reliability={"spikes": action})
    trainer = trainer_for(layout, config)
    trainer.spikes = SpikeWatch(config.reliability, trainer.objective.tasks)
    last = data_group().rank == data_group().size - 1
    trainer.spoil(
        lambda found: replace(found, sums=found.sums * (1000.0 if last and trainer.state.step == SPOILT else 1))
    )
    trainer.engine.train(True)
    moved = 0.0
    for step in range(10):
        before = trainer.engine.full_weights() if step == SPOILT else {}
        trainer.train_step()
        after = trainer.engine.full_weights() if step == SPOILT else {}
        moved += sum(float((after[name] - before[name]).abs().sum()) for name in after)
    trainer.read_stats()
    applied = [stats.applied for stats in trainer.history]  # type: ignore[attr-defined]
    trainer.engine.close()
    return applied, moved


@pytest.mark.parametrize("name", always(LAYOUTS, "fsdp"))
def test_a_spike_on_one_rank_is_skipped_on_all(two_ranks: Ranks, name: str) -> None:
    for applied, moved in two_ranks.run_layout(run, LAYOUTS[name], "skip"):
        assert applied == [step != SPOILT for step in range(10)]
        assert moved == 0.0


def test_a_warning_lets_it_pass() -> None:
    applied, moved = run(Layout(), "warn")
    assert all(applied) and moved > 0


@pytest.fixture
def spoilt_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of the command meet a spike in step 8 of the rows at position 7 x 8; steps that met it."""
    monkeypatch.setattr(spikes, "AT_LEAST", 4)
    met: list[int] = []
    context = Trainer.context

    def spoilt(self: Trainer, window: list[Batch], counts: torch.Tensor) -> Any:
        made = context(self, window, counts)
        if window[0].start == SPOILT * 8:
            met.append(self.state.step + 1)
            losses_of = made.compute_losses
            made.compute_losses = lambda micro: replace(  # type: ignore[method-assign]
                found := losses_of(micro), sums=found.sums * 1000.0
            )
        return made

    monkeypatch.setattr(Trainer, "context", spoilt)
    return met


def test_a_rollback_goes_on_from_the_checkpoint_with_the_rows_after_it(
    text_dataset: Path, tmp_path: Path, spoilt_runs: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "training__steps": 12,
        "checkpoint__every": 3,
        "checkpoint__keep": 0,
        "reliability__spikes": "rollback",
    } | SCORE
    assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == 0
    assert spoilt_runs == [8], "met once: its rows are passed over"
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))
    assert all(line["applied"] and line["loss"] < 100 for line in lines(tmp_path))
    (spike,) = read_incidents(tmp_path)
    assert (spike["kind"], spike["step"], spike["action"], len(spike["keys"])) == ("spike", 8, "rollback", 8)
    assert spike["found"][0]["name"] == "loss" and spike["found"][0]["value"] > 100 * spike["found"][0]["usual"]
    last, path = checkpoints(tmp_path)[-1]
    # Six steps stay, the spike is seen when the step after it is queued, and six more follow.
    assert (last, read_document(path).cursors["train"]) == (12, (9 + 6) * 8)
    assert "step 8" in capsys.readouterr().out
    assert json.loads((tmp_path / "stop.json").read_text())["why"] == "finished"


@pytest.mark.exhaustive
def test_a_stop_before_a_spike_changes_nothing(
    text_dataset: Path, tmp_path: Path, spoilt_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of the stop (7) is newer than the regular one (6), to which the run goes back."""
    changes = {"training__steps": 12, "checkpoint__every": 3, "checkpoint__keep": 1, "reliability__spikes": "rollback"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert pretrain_here(flags(text_dataset, whole, **changes, **SCORE)) == 0
    context = Trainer.context

    def stop_after_7(self: Trainer, window: list[Batch], counts: torch.Tensor) -> Any:
        if self.state.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return context(self, window, counts)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "context", stop_after_7)
        assert pretrain_here(flags(text_dataset, stopped, **changes, **SCORE)) == 0
    assert [step for step, _ in checkpoints(stopped)] == [6, 7]
    assert pretrain_here(flags(text_dataset, stopped, **changes, **SCORE)) == 0
    assert spoilt_runs == [8, 8]
    ours, theirs = (read_full_state(checkpoint_path(run, 12)) for run in (stopped, whole))
    assert unequal(ours, theirs) == []


def test_the_rollbacks_of_a_start_are_limited(text_dataset: Path, tmp_path: Path, spoilt_runs: list[int]) -> None:
    changes = {"training__steps": 12, "checkpoint__every": 3, "reliability__spikes": "rollback"} | SCORE
    assert pretrain_here(flags(text_dataset, tmp_path, **changes, reliability__max_rollbacks=0)) == 3
    assert [step for step, _ in checkpoints(tmp_path)] == [3, 6]
    record = json.loads((tmp_path / "stop.json").read_text())
    assert (record["status"], record["again"]) == (3, False)


def test_skipped_steps_are_counted_in_a_window_and_before_the_first_step(text_dataset: Path, tmp_path: Path) -> None:
    """A run that stopped for them does not make one more step at each start."""
    changes = {"training__steps": 12, "checkpoint__every": 1, "checkpoint__keep": 0, "optimizer__lr": 1e30}
    assert pretrain_here(flags(text_dataset, tmp_path, **changes, training__max_skipped_steps=2)) == 3
    before = [step for step, _ in checkpoints(tmp_path)]
    for _ in range(2):
        assert pretrain_here(flags(text_dataset, tmp_path, **changes, training__max_skipped_steps=2)) == 3
        assert [step for step, _ in checkpoints(tmp_path)] == before
    assert math.isfinite(lines(tmp_path)[0]["loss"])
    assert ReliabilityConfig().spikes == "warn"
