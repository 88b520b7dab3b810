"""Invariant 3 with an adversary: what is saved is all there is, bit for bit, on every engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import LAYOUTS, on_each_rank
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout, load_trainer, save_trainer
from tests.synthetic_images import image_config, image_trainer
from trp_scale.checkpoint.run_directory import checkpoint_path

SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "relative_embedding", "ascent": "adamw", "eps": 0.01, "norm": "l2", "where": "both"},
    "sequential": {"kind": "absolute_coordinate", "ascent": "adamw", "eps": 0.01, "update": "sequential"},
    "reset": {"kind": "relative_coordinate", "ascent": "sign", "lr": 4.0, "eps": 9.0, "on_saturation": "reset"},
    "pixels": {"kind": "pixels", "eps": 0.01},
}

State = tuple[dict[str, Tensor], dict[str, Any]]


def go_on(layout: Layout, name: str, directory: Path, resume: bool) -> State:
    """Three steps and a checkpoint, or three more from it; then the whole weights and the adversary's state."""
    config = image_config(layout, adversary=SETTINGS[name], optimizer={"lr": 3e-3})
    trainer, adversary = image_trainer(layout, config)
    if resume:
        load_trainer(trainer, checkpoint_path(directory, 3))
    trainer.engine.train(True)
    for _ in range(3):
        trainer.train_step()
    if not resume:
        save_trainer(trainer, directory)
        for _ in range(3):
            trainer.train_step()
    weights = trainer.engine.full_weights()
    trainer.engine.close()
    return weights, adversary.state_dict()


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return state.get("tensors", state)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layout", "settings"),
    always(
        product(["plain", "fsdp", "zero1", "zero2", "zero3"], SETTINGS),
        ("plain", "reset"),
        ("zero2", "adamw"),
    ),
)
def test_a_resumed_run_is_the_whole_one_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, layout: str, settings: str
) -> None:
    whole, halves = (on_each_rank(two_ranks, layout, go_on, settings, tmp_path, resume) for resume in (False, True))
    for (weights, state), (other_weights, other_state) in zip(whole, halves, strict=True):
        assert weights.keys() == other_weights.keys()
        assert [name for name, value in weights.items() if not torch.equal(value, other_weights[name])] == []
        assert unequal(tensors(other_state), tensors(state)) == []
    if settings != "pixels":
        assert tensors(whole[0][1])["vector"].abs().max() > 0


def test_an_adversary_moves_between_engines(two_ranks: Ranks, tmp_path: Path) -> None:
    """Saved on one rank, gone on with on two, within invariant 1."""
    whole, state = go_on(LAYOUTS["plain"], "sequential", tmp_path, False)
    weights, other_state = two_ranks(go_on, LAYOUTS["zero3"], "sequential", tmp_path, True)[0]
    for name, value in whole.items():
        if not name.endswith("qkv.bias"):  # a third of it has no gradient but rounding's
            assert (weights[name] - value).norm() <= 1e-5 * value.norm() + 1e-9, name
    mine, theirs = tensors(other_state)["vector"], tensors(state)["vector"]
    assert (mine - theirs).norm() < 1e-4 * theirs.norm()
    assert int(tensors(other_state)["steps"]) == 6
