"""Averages of the weights, as hooks. The settings stand here, where `--help` reads them without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trp_scale.config import Config
from trp_scale.config.components import component
from trp_scale.config.settings import Settings, setting


@component("hook", "weight_average", "trp_scale.averaging.weight_average:WeightAverage")
@dataclass(kw_only=True)
class WeightAverageSettings(Settings):
    """An exponential moving average of the weights, kept beside them: --weights average of other commands takes it."""

    decay: float = setting(0.9999, at_least=0, below=1)
    """Share of the average that stays in each step: it looks back over about 1 / (1 - decay) steps."""
    warmup: bool = True
    """Start with a small decay, (1 + t) / (10 + t) after t steps, so that the first weights are soon forgotten."""
    start_step: int = setting(0, at_least=0)
    """Step from which weights are averaged; before it the average is the weights themselves."""
    validate: bool = False
    """Validate, and measure what was fine-tuned, with the average in place of the weights."""

    def cautions(self, config: Config, steps_per_epoch: int) -> Iterator[str]:
        if self.start_step >= config.training.steps:
            yield (
                f"--weight_average.start_step {self.start_step} is not reached in --training.steps "
                f"{config.training.steps}: the average stays the weights themselves"
            )
