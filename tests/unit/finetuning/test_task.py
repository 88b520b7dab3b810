"""What all tasks have in common: how long a run is."""

from __future__ import annotations

import pytest

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.finetuning.task import set_length


@pytest.mark.parametrize(
    ("epochs", "share", "steps", "warmup"),
    [
        (3.0, 0.06, 30, 2),  # 100 rows in batches of 10
        (0.5, 0.5, 5, 2),  # half of an odd number goes to the even one
        (0.21, 0.0, 3, 7),  # a part of a step is a step; without a share the warm-up stays
        (0.001, 0.0, 1, 7),
        (0.0, 0.1, 40, 4),  # without epochs the steps stay
    ],
)
def test_steps_follow_from_epochs_and_the_warm_up_from_its_share(
    epochs: float, share: float, steps: int, warmup: int
) -> None:
    config = FinetuneConfig()
    config.batch.global_size, config.training.steps, config.optimizer.warmup_steps = 10, 40, 7
    config.downstream.epochs, config.downstream.warmup_share = epochs, share
    set_length(config, 100)
    assert (config.training.steps, config.optimizer.warmup_steps) == (steps, warmup)
