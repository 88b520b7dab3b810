"""The average of the weights, step by step (methods/weight_average.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout, RecordingTrainer, small_config, trainer_for
from trp_scale.core.hooks import Hooks
from trp_scale.methods.settings import WeightAverageSettings
from trp_scale.methods.weight_average import WeightAverage

STEPS = 6


def averaged(settings: WeightAverageSettings, **source: object) -> tuple[RecordingTrainer, WeightAverage]:
    trainer = trainer_for(Layout(), small_config(Layout()), **source)
    hook = WeightAverage(settings, trainer.run_context)
    trainer.hooks = Hooks(trainer.hooks.balancer, [hook])
    trainer.engine.train(True)
    return trainer, hook


def flat(trainer: RecordingTrainer) -> Tensor:
    """All weights, float64."""
    return torch.cat([weight.double().flatten() for weight in trainer.engine.full_weights().values()])


def average_of(hook: WeightAverage) -> Tensor:
    return torch.cat([part.double() for part in hook.average.parts])


@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        (WeightAverageSettings(decay=0.5, warmup=False), [0.5] * STEPS),
        (WeightAverageSettings(decay=0.3), [0.1, 2 / 11, 0.25, 0.3, 0.3, 0.3]),
        (WeightAverageSettings(decay=0.9, start_step=3), [0.0, 0.0, 0.0, 0.1, 2 / 11, 0.25]),
        (WeightAverageSettings(decay=0.0, warmup=False), [0.0] * STEPS),
    ],
)
def test_the_average_is_the_recursion_in_float64(settings: WeightAverageSettings, decays: list[float]) -> None:
    trainer, hook = averaged(settings)
    expected = flat(trainer)
    for decay in decays:
        trainer.train_step()
        expected = decay * expected + (1 - decay) * flat(trainer)
        assert (average_of(hook) - expected).norm() < 1e-6 * expected.norm()
    assert ((expected - flat(trainer)).norm() > 1e-4) == (decays[-1] > 0)
    assert hook.updates == sum(decay > 0 or settings.start_step == 0 for decay in decays)


def test_a_skipped_step_leaves_the_average() -> None:
    trainer, hook = averaged(WeightAverageSettings(decay=0.5, warmup=False))
    trainer.train_step()
    before = average_of(hook)
    trainer.engine.check_gradients = lambda: torch.tensor(torch.nan)  # type: ignore[method-assign]
    trainer.train_step()
    assert not trainer.history[-1].applied
    assert torch.equal(average_of(hook), before) and hook.updates == 1


@pytest.mark.parametrize("validate", [False, True])
def test_validation_reads_the_average_where_asked(validate: bool) -> None:
    trainer, hook = averaged(WeightAverageSettings(decay=0.9, warmup=False, validate=validate))
    for _ in range(3):
        trainer.train_step()
    weights, average = flat(trainer), average_of(hook)
    assert not torch.equal(weights, average)
    with trainer.hooks.validation():
        assert torch.equal(flat(trainer), average if validate else weights)
    assert torch.equal(flat(trainer), weights) and torch.equal(average_of(hook), average)
