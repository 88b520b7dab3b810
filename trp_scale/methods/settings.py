"""Settings of the hooks weight_average and gradient_noise_scale, which `--help` reads without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trp_scale.config import Config
from trp_scale.config.registry import MetricPlot, component, describe_metrics
from trp_scale.config.settings import Settings, setting


@component("hook", "weight_average", "trp_scale.methods.weight_average:WeightAverage")
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


@component("hook", "gradient_noise_scale", "trp_scale.methods.gradient_noise_scale:GradientNoiseScale")
@dataclass(kw_only=True)
class GradientNoiseScaleSettings(Settings):
    """Measure the batch size beyond which larger batches bring little, from the gradients of micro-batches."""

    smoothing: float = setting(0.99, at_least=0, below=1)
    """Share of the past in the averages of both estimates: they look back over about 1 / (1 - smoothing) steps."""

    def problems(self, config: Config) -> Iterator[str]:
        batch = config.batch
        if batch.micro_size != "auto" and batch.global_size < 2 * batch.micro_size:
            yield (
                f"--batch.micro_size is {batch.micro_size} and --batch.global_size {batch.global_size}, but the hook "
                "gradient_noise_scale compares micro-batches with the global batch; allowed: half of it or less"
            )


describe_metrics(
    "gradient_noise_scale",
    title="Gradient noise scale",
    look_for="A batch much smaller than this leaves each step noisy; a much larger one brings little.",
    plots=[
        MetricPlot(title="Noise scale", names=("noise_scale",), unit="rows"),
        MetricPlot(
            title="What it is made of",
            names=("trace", "squared_norm"),
            log=True,
            note="Trace of the gradients' covariance, and the squared norm of their mean; both averaged.",
        ),
    ],
)
