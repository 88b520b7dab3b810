"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from trp_scale.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step` (from 0) of `steps`.

    Linear warm-up over `warmup_steps`: the first step has lr / warmup_steps, the last of the warm-up the full lr. After
    it linear or cosine decay that reaches `min_lr` at the last step, or no decay.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = steps - 1 - config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / left) if left > 0 else 1.0
    if config.schedule == "constant":
        return config.lr
    factor = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * factor
