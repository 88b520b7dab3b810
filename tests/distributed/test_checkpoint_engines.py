"""One run that changes its engine and its number of ranks at every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import stored_state, unequal
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import TWO_RANKS, Layout, data_group, load_trainer, save_trainer, small_config, trainer_for
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path as step_path
from trp_scale.core.batch import StepStats
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.distributed.groups import check_shared_directory, on_rank_zero, run_on_all_ranks
from trp_scale.errors import CheckpointError

STEPS = 2
"""Steps on each layout."""
MUON = {"optimizer": {"kind": "muon", "lr": 0.01, "clipping": 1.0}}
PATHS = {
    "through every engine": ("plain", "zero3", "fsdp", "ddp", "hybrid", "zero2", "zero1", "zero0", "plain"),
    "back again": ("zero0", "zero1", "zero2", "fsdp", "zero3", "ddp", "plain"),
    "Muon": ("plain", "zero3", "fsdp", "ddp", "zero2"),
}
CHANGES: dict[str, dict[str, Any]] = {"Muon": MUON}


def seen(stats: StepStats) -> dict[str, float]:
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr}


def uninterrupted(run_dir: Path, parts: int, changes: dict[str, Any] | None = None) -> list[dict[str, float]]:
    """One plain process with a checkpoint each STEPS; returns what the first step after each of them saw."""
    layout = Layout(engine="plain")
    trainer = trainer_for(layout, small_config(layout, balancer={"estimate": "lagged"}, **(changes or {})))
    trainer.engine.train(True)
    for _ in range(parts):
        for _ in range(STEPS):
            trainer.train_step()
        save_trainer(trainer, run_dir)
    trainer.engine.close()
    return [seen(stats) for stats in trainer.history[::STEPS]]


def go_on(
    layout: Layout, checkpoint: Path | None, run_dir: Path, echo_dir: Path, changes: dict[str, Any] | None = None
) -> dict[str, float]:
    """Load, save at once into echo_dir, train STEPS, save into run_dir; returns what the first step saw."""
    trainer = trainer_for(layout, small_config(layout, balancer={"estimate": "lagged"}, **(changes or {})))
    if checkpoint is not None:
        loaded = load_trainer(trainer, checkpoint)
        assert trainer.engine.optimizer_steps() == loaded.optimizer_steps == loaded.step
        save_trainer(trainer, echo_dir)
    trainer.engine.train(True)
    for _ in range(STEPS):
        trainer.train_step()
    save_trainer(trainer, run_dir)
    trainer.engine.close()
    return seen(trainer.history[0])


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, all tensors together."""
    difference = torch.stack([(found[name] - tensor).double().norm() for name, tensor in expected.items()]).norm()
    return float(difference / torch.stack([tensor.double().norm() for tensor in expected.values()]).norm())


def walk(path: Sequence[Layout], tmp_path: Path, ranks: Ranks, changes: dict[str, Any] | None = None) -> None:
    """STEPS on each layout from the checkpoint of the one before give the steps, weights and moments of a run that
    stayed on one process. A checkpoint that is loaded and written again is the same, bit for bit."""
    expected = uninterrupted(tmp_path / "reference", len(path), changes)
    checkpoint: Path | None = None
    for number, layout in enumerate(path):
        step, echo = STEPS * (number + 1), tmp_path / f"echo{number}"
        found = ranks.run_layout(go_on, layout, checkpoint, tmp_path / "run", echo, changes)
        where = f"{layout.engine} stage {layout.stage} at step {step}"
        if checkpoint is not None:
            again = stored_state(step_path(echo, step - STEPS))
            assert unequal(again, stored_state(checkpoint)) == [], f"{where} after loading"
        for values in found:
            assert values == pytest.approx(expected[number], rel=1e-5), where
        checkpoint = step_path(tmp_path / "run", step)
        paths = (checkpoint, step_path(tmp_path / "reference", step))
        for state in ("weight", *STATE_NAMES):
            assert distance(*(read_full_state(path, state) for path in paths)) < 1e-5, f"{where}: {state}"


@pytest.mark.parametrize("path", always(PATHS, "through every engine", "Muon"))
def test_a_run_that_changes_its_engine_at_every_checkpoint(path: str, tmp_path: Path, two_ranks: Ranks) -> None:
    walk([{"plain": Layout(), **TWO_RANKS}[name] for name in PATHS[path]], tmp_path, two_ranks, CHANGES.get(path))


def failure_seen(failing: int, rank_zero_only: bool, run_dir: Path) -> str:
    """The message that this rank saw when rank `failing` alone failed; empty if none."""
    group, message = data_group(), ""

    def action() -> int:
        if group.rank == failing:
            raise OSError(28, "No space left on device")
        return group.rank

    try:
        (on_rank_zero if rank_zero_only else run_on_all_ranks)(group, "a try", action)
    except CheckpointError as error:
        message = str(error)
    check_shared_directory(run_dir, group)  # the ranks still meet each other where they should
    return message


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("rank_zero_only", [False, True])
def test_one_rank_s_failure_reaches_the_others(
    failing: int, rank_zero_only: bool, tmp_path: Path, two_ranks: Ranks
) -> None:
    said = f"a try failed on 1 of 2 ranks: rank {failing}: OSError: [Errno 28] No space left on device"
    heard = "" if rank_zero_only and failing == 1 else said  # rank 1 is never asked then
    assert two_ranks(failure_seen, failing, rank_zero_only, tmp_path) == [heard] * 2
