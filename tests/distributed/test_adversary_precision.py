"""The adversary under low precision: fp32 itself, unscaled under fp16's loss scaler, still on a skipped step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.engine_layouts import fp16_layout, fp16_on_a_cpu
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout
from tests.synthetic_images import image_config, image_trainer, run_images

STEPS = 10
PARALLEL = {"update": "parallel"}
SEQUENTIAL = {"update": "sequential"}


def changes(update: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {
        "adversary": {"kind": "absolute_embedding", "ascent": "sgd", "lr": 1.0, "eps": 1.0, "norm": "l2", **update},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "training": {"steps": STEPS, **training},
    }


def searching_run(stage: int, update: dict[str, Any], power: int) -> dict[str, Any]:
    """fp16 from a scale of 2^power down to one that does not overflow."""
    with fp16_on_a_cpu():
        layout = fp16_layout(stage, initial_scale_power=power)
        trainer, adversary = image_trainer(layout, image_config(layout, **changes(update, precision="fp16")))
        vectors, scales = [adversary.vector.detach().clone()], []
        for _ in range(STEPS):
            trainer.train_step()
            vectors.append(adversary.vector.detach().clone())
            scales.append(trainer.engine.extra_state()["cur_scale"])
        trainer.engine.close()
        applied = [stats.applied for stats in trainer.history]
        return {"vectors": vectors, "scales": scales, "applied": applied}


@pytest.mark.parametrize(
    ("stage", "update"),
    always([(0, PARALLEL), (1, SEQUENTIAL), (2, PARALLEL), (3, SEQUENTIAL)]),
)
def test_under_the_scaler_of_fp16(two_ranks: Ranks, stage: int, update: dict[str, Any]) -> None:
    first, second = two_ranks(searching_run, stage, update, 22)
    assert first["applied"] == second["applied"]
    assert not first["applied"][0] and first["applied"][-1], "no search took place"
    vectors = first["vectors"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(vectors, second["vectors"], strict=True))
    for applied, before, after in zip(first["applied"], vectors, vectors[1:], strict=False):
        assert torch.equal(before, after) is not applied
    # An overflow in the adversary's own pass is not for the scaler: one lower scale for each skipped step, no more.
    skipped = first["applied"].count(False)
    assert first["scales"][-1] == 2.0 ** (22 - skipped)
    assert vectors[-1].dtype == torch.float32


@pytest.mark.parametrize(
    ("stage", "update"),
    always([(0, SEQUENTIAL), (1, PARALLEL), (3, PARALLEL), (3, SEQUENTIAL)], (0, SEQUENTIAL)),
)
def test_the_loss_scale_is_not_in_the_gradient(two_ranks: Ranks, stage: int, update: dict[str, Any]) -> None:
    """From a scale that never overflows, fp16 climbs as fp32 does, within fp16's rounding."""
    ours = two_ranks(searching_run, stage, update, 8)[0]
    assert all(ours["applied"])
    theirs = run_images(Layout(), changes(update))
    assert theirs.vector is not None
    assert (ours["vectors"][-1] - theirs.vector).norm() < 0.02 * theirs.vector.norm()


@pytest.mark.parametrize(
    ("kind", "lr"),
    always(
        [
            ("absolute_embedding", 1.0),
            ("absolute_coordinate", 1.0),
            ("relative_embedding", 100.0),
            ("relative_coordinate", 1000.0),
        ],
        *(("absolute_embedding", 1.0), ("relative_coordinate", 1000.0)),
    ),
)
def test_bf16_climbs_as_fp32_does(kind: str, lr: float) -> None:
    rough = {**changes(PARALLEL), "training": {"precision": "bf16", "steps": STEPS}}
    ours, theirs = (
        run_images(Layout(), {**each, "adversary": {**each["adversary"], "kind": kind, "lr": lr}})
        for each in (rough, changes(PARALLEL))
    )
    assert ours.vector is not None and theirs.vector is not None
    assert ours.vector.dtype == torch.float32
    assert not torch.equal(ours.vector, ours.vector.bfloat16().float()), "the vector itself is rounded to bf16"
    assert (ours.vector - theirs.vector).norm() < 0.1 * theirs.vector.norm()
