"""Settings of the hooks weight_average and gradient_noise_scale, which `--help` reads without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trp_scale.config import Config
from trp_scale.config.registry import MetricPlot, Settings, component, describe_metrics, setting


@component("hook", "weight_average", "trp_scale.methods.weight_average:WeightAverage")
@dataclass(kw_only=True)
class WeightAverageSettings(Settings):
    """Keep an exponential moving average of the weights. Other commands read it with --weights average."""

    decay: float = setting(0.9999, at_least=0, below=1)
    """Decay of the average per step. The average covers about 1 / (1 - decay) steps."""
    warmup: bool = True
    """Start with a smaller decay, (1 + t) / (10 + t) after t steps, to forget the initial weights quickly."""
    start_step: int = setting(0, at_least=0)
    """First averaged step. Before it, the average equals the weights."""
    validate: bool = False
    """Use the average instead of the weights for validation and for the evaluation of a fine-tuned model."""

    def cautions(self, config: Config, steps_per_epoch: int) -> Iterator[str]:
        if self.start_step >= config.training.steps:
            yield (
                f"--weight_average.start_step {self.start_step} is not reached in --training.steps "
                f"{config.training.steps}: the average stays equal to the weights"
            )


@component("hook", "gradient_noise_scale", "trp_scale.methods.gradient_noise_scale:GradientNoiseScale")
@dataclass(kw_only=True)
class GradientNoiseScaleSettings(Settings):
    """Estimate the batch size beyond which larger batches help little, from the gradients of micro-batches."""

    smoothing: float = setting(0.99, at_least=0, below=1)
    """Decay of the moving averages of both estimates. They cover about 1 / (1 - smoothing) steps."""

    def problems(self, config: Config) -> Iterator[str]:
        batch = config.batch
        if batch.micro_size != "auto" and batch.global_size < 2 * batch.micro_size:
            yield (
                f"--batch.micro_size is {batch.micro_size} and --batch.global_size {batch.global_size}, but the hook "
                "gradient_noise_scale compares micro-batches with the global batch; allowed: at most half of it"
            )

    def against_capturing(self, config: Config) -> Iterator[str]:
        yield "the hook gradient_noise_scale reads the gradient of each micro-batch during the backward pass"


describe_metrics(
    "gradient_noise_scale",
    title="Gradient noise scale",
    look_for="Steps are noisy if the batch is much smaller than this. A much larger batch helps little.",
    plots=[
        MetricPlot(title="Noise scale", names=("noise_scale",), unit="rows"),
        MetricPlot(
            title="Estimates",
            names=("trace", "squared_norm"),
            log=True,
            note="Moving averages: trace of the gradient covariance, squared norm of the mean gradient.",
        ),
    ],
)
