"""BLO-MAE and fine-tuning against automatic differentiation through committed steps, in float64 (issue line 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.synthetic_hypergradients import held_adamw, state
from tests.synthetic_masks import D_TR, D_VAL, MasksRun, labelled
from tests.unit.methods.learned_masks import exact_second_levels
from tests.unit.methods.learned_masks.exact_hypergradient import Rule, Weights
from tests.unit.methods.learned_masks.exact_second_levels import Found
from tests.unit.methods.learned_masks.test_hypergradient import Recorder, copies, relative, start
from trp_scale.core.batch import Batch
from trp_scale.methods.learned_masks.hypergradient import ValidationLoss
from trp_scale.methods.learned_masks.second_levels import FineTunedValidationLoss

CYCLES, UNROLL = 3, 2
DECODER = ("decoder_", "prediction.", "mask_token")
"""Of the second encoder's module: no part of what is asked."""


@dataclass
class Watched:
    """A run up to an outer step, and what its exact hypergradient needs.

    Attributes:
        before, tuned_before, head_before: weights before the last step.
        encoder_rule, tuned_rule, head_rule: that step's, second moments held.
        train, validation: its global batches.
    """

    run: MasksRun
    recorder: Recorder
    before: Weights
    tuned_before: Weights
    head_before: Weights
    encoder_rule: Rule
    head_rule: Rule
    tuned_rule: Rule
    train: Batch
    validation: Batch
    lr: float

    def differences(self, exact: Found) -> tuple[float, float, float]:
        """How far the hypergradient, the asked encoder and the head are from the exact ones."""
        run = self.run
        assert run.hook is not None and isinstance(run.hook.outer, ValidationLoss)
        module = run.networks[1] if len(run.networks) > 1 else run.model
        own = run.hook.outer.level.head.parameters
        head = {"weight": own.weight, "bias": own.bias}
        encoder = {name: value for name, value in exact.encoder.items() if not name.startswith(DECODER)}
        return (
            relative(self.recorder.gradient, exact.hypergradient),
            relative(copies(module), encoder if len(run.networks) > 1 else exact.encoder),
            relative(head, exact.head),
        )


def watched(settings: dict[str, Any], *, second_level: str, micro_size: int) -> Watched:
    multilevel = {"kind": second_level, "unroll": UNROLL, **settings["multilevel"]}
    run = start(micro_size=micro_size, **{**settings, "multilevel": multilevel})
    assert run.hook is not None and isinstance(run.hook.outer, ValidationLoss)
    outer, config = run.hook.outer, run.trainer.config
    recorder, head, size = Recorder(run), outer.level.head, config.batch.global_size
    tuned = run.networks[1] if second_level == "fine_tuning" else run.model
    second: Any = outer.tuned if isinstance(outer, FineTunedValidationLoss) else run.engine

    def states(key: str) -> list[Weights]:
        of_head = {name: values[key] for name, values in head.state_dict().items()}
        return [state(run.engine, key), state(second, key), of_head]

    for _ in range(CYCLES * UNROLL - 1):
        run.trainer.train_step()
    weights = [copies(run.model), copies(tuned), {name: value.detach().clone() for name, value in head._names()}]
    means = states("exp_avg")
    run.trainer.train_step()
    squares = states("exp_avg_sq")
    lr = run.trainer.history[-1].lr  # type: ignore[attr-defined]
    head_lr = config.multilevel.head_lr * lr / config.optimizer.lr
    decay = {name: config.optimizer.weight_decay if value.ndim > 1 else 0.0 for name, value in weights[0].items()}
    head_decay = {"weight": config.multilevel.head_weight_decay, "bias": 0.0}
    every_step = second_level == "joint"
    head_steps = CYCLES * (UNROLL if every_step else 1)
    steps, rates = [CYCLES * UNROLL, CYCLES, head_steps], [lr, lr, head_lr]
    rules = [
        held_adamw(mean, square, step, rate, config, own)
        for mean, square, step, rate, own in zip(means, squares, steps, rates, [decay, decay, head_decay], strict=True)
    ]
    train, validation = D_TR + (head_steps - 1) * size, D_VAL + (CYCLES - 1) * size
    return Watched(
        run=run,
        recorder=recorder,
        before=weights[0],
        tuned_before=weights[1],
        head_before=weights[2],
        encoder_rule=rules[0],
        tuned_rule=rules[1],
        head_rule=rules[2],
        train=labelled(range(train, train + size)),
        validation=labelled(range(validation, validation + size)),
        lr=lr,
    )


def joint(settings: dict[str, Any], micro_size: int) -> tuple[float, float, float]:
    """How far ours are from the exact ones."""
    found = watched(settings, second_level="joint", micro_size=micro_size)
    config = found.run.trainer.config
    exact = exact_second_levels.joint(
        found.run.model,
        found.before,
        found.run.networks[0],
        found.recorder.own,
        found.head_before,
        lower=found.recorder.lower(),
        train=found.train,
        validation=found.validation,
        encoder_rule=found.encoder_rule,
        head_rule=found.head_rule,
        normalise=config.multilevel.weights == "normalised",
        gamma=config.multilevel.gamma,
    )
    return found.differences(exact)


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"gamma": 0.3}},
        {"multilevel": {"gamma": 3.0, "network": "patchwise", "weights": "normalised"}},
        {"multilevel": {"gamma": 0.3}, "vision": {"tokens": "all", "positions": "relative"}},
    ],
)
def test_a_joint_step_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    hypergradient, encoder, head = joint(settings, micro_size)
    assert hypergradient < 1e-6 and encoder < 1e-9 and head < 1e-12  # targets are fp32


def fine_tuned(settings: dict[str, Any], micro_size: int) -> tuple[float, float, float]:
    """How far ours are from the exact ones."""
    found = watched(settings, second_level="fine_tuning", micro_size=micro_size)
    exact = exact_second_levels.fine_tuned(
        found.run.model,
        found.before,
        found.tuned_before,
        found.run.networks[0],
        found.recorder.own,
        found.head_before,
        lower=found.recorder.lower(),
        train=found.train,
        validation=found.validation,
        encoder_rule=found.encoder_rule,
        tuned_rule=found.tuned_rule,
        head_rule=found.head_rule,
        pull=2 * found.lr * found.run.trainer.config.multilevel.proximity,
    )
    return found.differences(exact)


@pytest.mark.parametrize("micro_size", [8, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"multilevel": {"proximity": 20.0}},
        {"multilevel": {"proximity": 1.0, "network": "patchwise"}},
        {"multilevel": {"proximity": 20.0}, "vision": {"tokens": "all", "positions": "relative"}},
    ],
)
def test_a_fine_tuning_step_against_automatic_differentiation(settings: dict[str, Any], micro_size: int) -> None:
    hypergradient, encoder, head = fine_tuned(settings, micro_size)
    assert hypergradient < 1e-6 and encoder < 1e-9 and head < 1e-12  # targets are fp32
