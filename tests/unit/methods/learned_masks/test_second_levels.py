"""BLO-MAE and fine-tuning against automatic differentiation through committed steps, in float64 (issue line 1)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.synthetic_hypergradients import Watched, held_adamw, state
from tests.synthetic_masks import D_TR, D_VAL, MasksRun, labelled
from tests.unit.methods.learned_masks.exact_hypergradient import Weights
from tests.unit.methods.learned_masks.exact_second_levels import Levels
from tests.unit.methods.learned_masks.test_hypergradient import relative, start
from trp_scale.methods.learned_masks.hypergradient import ValidationLoss
from trp_scale.methods.learned_masks.second_levels import FINE_TUNED

CYCLES, UNROLL = 3, 2
DECODER = ("decoder_", "prediction.", "mask_token")
"""Of the second encoder's module: no part of what is asked."""


def weights_of(run: MasksRun, key: str) -> list[Weights]:
    """weight, exp_avg or exp_avg_sq of the encoder, the second encoder (the first without one), and the head."""
    assert run.hook is not None and isinstance(run.hook.outer, ValidationLoss)
    head = run.hook.outer.level.head.state_dict()
    of_head = {name: values["value" if key == "weight" else key] for name, values in head.items()}
    return [state(run.engine, key), state(run.hook.engines().get(FINE_TUNED, run.engine), key), of_head]


def watch_outer_step(run: MasksRun) -> tuple[Levels, Watched]:
    """Train up to an outer step; return what its exact hypergradient needs, with second moments held, and ours."""
    config, watched, size = run.trainer.config, Watched(run), run.trainer.config.batch.global_size
    for _ in range(CYCLES * UNROLL - 1):
        run.trainer.train_step()
    weights, means = weights_of(run, "weight"), weights_of(run, "exp_avg")
    run.trainer.train_step()
    lr = run.trainer.history[-1].lr  # type: ignore[attr-defined]
    head_lr = config.multilevel.head_lr * lr / config.optimizer.lr
    decay = {name: config.optimizer.weight_decay if value.ndim > 1 else 0.0 for name, value in weights[0].items()}
    head_decay = {"weight": config.multilevel.head_weight_decay, "bias": 0.0}
    head_steps = CYCLES * (UNROLL if config.multilevel.kind == "joint" else 1)
    steps, rates = [CYCLES * UNROLL, CYCLES, head_steps], [lr, lr, head_lr]
    moments = zip(means, weights_of(run, "exp_avg_sq"), steps, rates, [decay, decay, head_decay], strict=True)
    rules = [held_adamw(mean, square, step, rate, config, own) for mean, square, step, rate, own in moments]
    train, validation = D_TR + (head_steps - 1) * size, D_VAL + (CYCLES - 1) * size
    levels = Levels(
        model=run.model,
        masking=run.networks[0],
        encoder=weights[0],
        tuned=weights[1],
        head=weights[2],
        network=watched.network,
        encoder_rule=rules[0],
        tuned_rule=rules[1],
        head_rule=rules[2],
        lower=watched.lower(),
        train=labelled(range(train, train + size)),
        validation=labelled(range(validation, validation + size)),
    )
    return levels, watched


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"kind": "joint", "gamma": 0.3}},
        {"multilevel": {"kind": "joint", "gamma": 3.0, "network": "patchwise", "weights": "normalised"}},
        {"multilevel": {"kind": "joint", "gamma": 0.3}, "vision": {"tokens": "all", "positions": "relative"}},
        {"multilevel": {"kind": "fine_tuning", "proximity": 20.0}},
        {"multilevel": {"kind": "fine_tuning", "proximity": 1.0, "network": "patchwise"}},
        {
            "multilevel": {"kind": "fine_tuning", "proximity": 20.0},
            "vision": {"tokens": "all", "positions": "relative"},
        },
    ],
)
def test_a_step_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    run = start(micro_size=micro_size, **{**settings, "multilevel": {"unroll": UNROLL, **settings["multilevel"]}})
    levels, watched = watch_outer_step(run)
    masks = run.trainer.config.multilevel
    if masks.kind == "joint":
        exact = levels.joint(masks.gamma, normalise=masks.weights == "normalised")
    else:
        exact = levels.fine_tuned(masks.pull(run.trainer.history[-1].lr))  # type: ignore[attr-defined]
        for name in [name for name in exact.encoder if name.startswith(DECODER)]:
            del exact.encoder[name]
    _, encoder, head = weights_of(run, "weight")
    assert relative(watched.gradient, exact.hypergradient) < 1e-6  # targets are fp32
    assert relative(encoder, exact.encoder) < 1e-9 and relative(head, exact.head) < 1e-12
