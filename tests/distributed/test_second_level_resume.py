"""Invariant 3 with joint steps and with a fine-tuned second encoder: what is saved is all there is, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import on_each_rank
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout, load_trainer, save_trainer
from tests.synthetic_masks import mask_config, masks_run
from trp_scale.checkpoint.manager import EngineGroup
from trp_scale.checkpoint.run_directory import checkpoint_path

LEVELS: dict[str, dict[str, Any]] = {
    "joint": {"kind": "joint", "gamma": 0.5},
    "fine_tuning": {"kind": "fine_tuning", "proximity": 20.0},
}
STEPS = 3
"""Before the stop, which is within a cycle; the last outer step comes after 8."""


def go_on(layout: Layout, level: str, directory: Path, resume: bool) -> dict[str, Tensor]:
    """Three steps and a checkpoint, and five more, or these from it; then everything that the run holds."""
    run = masks_run(
        layout, mask_config(layout, multilevel={"unroll": 2, "every": 2, "difference": 1.0, **LEVELS[level]})
    )
    trainer = run.trainer
    assert run.hook is not None
    engines = EngineGroup(run.engine, run.hook.engines())
    downstream: Any = run.hook.outer.sources  # type: ignore[attr-defined]
    own = getattr(trainer.source, "own", trainer.source)
    sources: dict[str, Any] = {"train": own, "downstream": downstream.train, "validation": downstream.validation}
    if resume:
        loaded = load_trainer(trainer, checkpoint_path(directory, STEPS), engines)
        for name, source in sources.items():
            source.cursor = loaded.cursors[name]
    else:
        for _ in range(STEPS):
            trainer.train_step()
        engines.prepare()
        save_trainer(trainer, directory, engines, {name: source.cursor for name, source in sources.items()})
    for _ in range(8 - STEPS):
        trainer.train_step()
    assert run.hook.outer_steps == 2
    head = run.hook.outer.level.head.state_dict()  # type: ignore[attr-defined]
    found = {f"head.{name}.{key}": value for name, state in head.items() for key, value in state.items()}
    for name, engine in {"encoder": run.engine, **run.hook.engines()}.items():
        found |= {f"{name}.{key}": value for key, value in engine.full_weights().items()}
        engine.close()
    return found


@pytest.mark.parametrize(
    ("level", "layout"),
    always(
        [
            ("joint", "plain"),
            ("joint", "zero3"),
            ("fine_tuning", "plain"),
            ("fine_tuning", "ddp"),
            ("fine_tuning", "fsdp"),
            ("fine_tuning", "zero2"),
        ],
        ("joint", "plain"),
        ("fine_tuning", "fsdp"),
    ),
)
def test_a_resumed_run_is_the_whole_one_bit_for_bit(two_ranks: Ranks, tmp_path: Path, level: str, layout: str) -> None:
    whole = on_each_rank(two_ranks, layout, go_on, level, tmp_path, False)[0]
    halves = on_each_rank(two_ranks, layout, go_on, level, tmp_path, True)[0]
    assert unequal(halves, whole) == []
    assert any(name.startswith("fine_tuned.") for name in whole) == (level == "fine_tuning")


def test_a_second_encoder_moves_between_engines(two_ranks: Ranks, tmp_path: Path) -> None:
    """Saved on one rank, gone on with on two, within invariant 1."""
    whole = go_on(Layout(), "fine_tuning", tmp_path, False)
    other = two_ranks(go_on, Layout(engine="deepspeed", stage=2), "fine_tuning", tmp_path, True)[0]
    for name, value in whole.items():
        if name.startswith(("encoder.blocks", "fine_tuned.blocks")) and not name.endswith("qkv.bias"):
            assert (other[name] - value).norm() <= 1e-5 * value.norm() + 1e-9, name
