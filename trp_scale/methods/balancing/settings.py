"""Settings of the balancers, which combine the task losses into one loss (TRP 3, 6; docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trp_scale.config.registry import MetricPlot, Settings, component, describe_metrics, setting


@dataclass(kw_only=True)
class FixedSumSettings(Settings):
    """Settings of balancers whose weights have a fixed sum."""

    total: Literal["1", "paper"] = "1"
    """Sum of the balanced weights: 1, so that methods are comparable, or that of the paper (uniform with form = sum,
    gradnorm, dwa: T)."""


@dataclass(kw_only=True)
class LossReadingSettings(Settings):
    """Settings of balancers that compute weights from losses."""

    scale: Literal["none", "initial", "reference"] = "none"
    """Scaling of the losses that the balancer reads. none: unscaled (paper). initial: divided by the loss of the first
    step. reference: minus a reference."""
    reference: dict[str, float] = setting(dict)
    """Reference loss by task name, for scale = reference."""
    reference_file: str = ""
    """File with the reference losses of all balanced tasks, which trp-scale reference writes from an earlier run."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.scale == "reference" and bool(self.reference) == bool(self.reference_file):
            yield (
                f"--balancer.scale is reference, with --balancer.reference {self.reference or 'empty'} and "
                f"--balancer.reference_file {self.reference_file or 'empty'}; allowed: one of the two, for example "
                "--balancer.reference verb 2.1 noun 3"
            )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        for name in ("reference", "reference_file"):
            if getattr(self, name) and self.scale != "reference":
                yield f"--balancer.{name} is given but --balancer.scale is {self.scale}: it has no effect"


@dataclass(kw_only=True)
class GlobalLossSettings(LossReadingSettings):
    """Settings of balancers that compute the weights of a batch from its losses."""

    estimate: Literal["exact", "lagged", "micro"] = "exact"
    """exact: losses of this global batch; costs an extra forward pass with gradient accumulation. lagged: losses of the
    previous step, without cost. micro: losses of each micro-batch alone; a baseline, not the algorithm."""
    loss_ema: float = setting(0.0, at_least=0, below=1)
    """Decay of the moving average of losses that the weights are computed from; 0 = none (paper)."""
    min_count: int = setting(0, at_least=0)
    """Tasks with fewer elements than this in the global batch get no weight in this step."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.estimate == "micro" and config.batch.micro_size == "auto":
            yield (
                "--batch.micro_size is auto, but the result of --balancer.estimate micro depends on it; allowed: a "
                "number, or --balancer.estimate exact or lagged"
            )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        yield from super().cautions(config, steps_per_epoch)
        if self.estimate == "micro":
            yield (
                "--balancer.estimate micro weighs each micro-batch by its own losses alone: a biased baseline, not the "
                "method; exact and lagged use the losses of the global batch"
            )


@dataclass(kw_only=True)
class RatioSettings(LossReadingSettings):
    """Settings of balancers that use ratios or logarithms of losses."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        yield from super().cautions(config, steps_per_epoch)
        if self.scale == "initial" and self.kind != "uncertainty":
            yield (
                f"--balancer.scale initial has no effect with --balancer.kind {self.kind}, which reads only ratios of "
                "losses of one task"
            )
        if self.scale == "reference":
            yield (
                f"--balancer.scale reference with --balancer.kind {self.kind}: a loss at or below its reference counts "
                "as 0.001 above it, so its weight depends on this bound"
            )


@dataclass(kw_only=True)
class TapSettings(Settings):
    """Settings of balancers that compare the gradients of tasks."""

    at: Literal["weights", "representation"] = setting("weights")
    """Measure each task's gradient by the weights of the last shared layer, or by the shared representation."""


@component("balancer", "uniform", "trp_scale.methods.balancing.base:Uniform")
@dataclass(kw_only=True)
class UniformSettings(FixedSumSettings):
    """Equal weights for all tasks (TRP eq. 4)."""

    form: Literal["mean", "sum"] = setting("mean")
    """With total = paper: 1/T each (TRP eq. 4), or 1 each (MultiMAE)."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.form == "sum" and self.total == "1":
            yield "--balancer.form sum has no effect with --balancer.total 1; use --balancer.total paper"


@component("balancer", "proportional", "trp_scale.methods.balancing.base:Proportional")
@dataclass(kw_only=True)
class ProportionalSettings(Settings):
    """Weights proportional to the number of elements (plain BERT)."""


@component("balancer", "random", "trp_scale.methods.balancing.base:RandomWeights")
@dataclass(kw_only=True)
class RandomSettings(Settings):
    """New random weights in every step: softmax of normal draws (Lin et al. 2022, RLW)."""

    temperature: float = setting(1.0, above=0)
    """Temperature of the softmax: small values select one task per step, large values give equal weights."""


@component("balancer", "minimax", "trp_scale.methods.balancing.global_losses:Minimax")
@dataclass(kw_only=True)
class MinimaxSettings(GlobalLossSettings):
    """Softmax of alpha x loss over the tasks (TRP eq. 7)."""

    alpha: float = setting(1.0, at_least=0)
    """Sharpness of the softmax over task losses."""
    alpha_schedule: Literal["constant", "spread", "theorem", "hard"] = "constant"
    """constant: alpha. spread: alpha divided by the standard deviation of the losses in each step, which removes their
    unit; with alpha = 1, a loss one deviation larger has 2.7 times the weight. theorem: growing alpha of TRP Theorem
    3.1 (radius, lipschitz, bound). hard: only the task with the largest loss."""
    radius: float = setting(1.0, above=0)
    """R0 of Theorem 3.1: distance from the initial weights to the optimum."""
    lipschitz: float = setting(1.0, above=0)
    """L' of Theorem 3.1: Lipschitz constant of the task losses."""
    bound: float = setting(1.0, above=0)
    """B of Theorem 3.1: bound of the task losses."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        yield from super().cautions(config, steps_per_epoch)
        if self.estimate == "micro" and self.loss_ema > 0:
            yield (
                f"--balancer.loss_ema {self.loss_ema:g} has no effect with --balancer.estimate micro, which does not "
                "smooth losses; exact and lagged do"
            )


@component("balancer", "group_dro", "trp_scale.methods.balancing.global_losses:GroupDro")
@dataclass(kw_only=True)
class GroupDroSettings(GlobalLossSettings):
    """Exponentiated gradient ascent on the weights (Sagawa et al. 2020, Algorithm 1)."""

    rate: float = setting(0.01, above=0)
    """Step size of the ascent on the weights, eta_q of Sagawa et al."""
    adjustment: float = setting(0.0, at_least=0)
    """C of the adjustment C / sqrt(n_t) that is added to each loss; n_t: size of the group."""
    group_sizes: Literal["data_set", "batch"] = "data_set"
    """n_t of the adjustment. data_set: elements of the task in the training rows (Sagawa et al.), extrapolated from the
    first 2,048 rows. batch: elements in the global batch, as before 2026-11-27."""


@component("balancer", "famo", "trp_scale.methods.balancing.famo:Famo")
@dataclass(kw_only=True)
class FamoSettings(GlobalLossSettings, RatioSettings):
    """Weights under which all losses fall at the same rate (FAMO, Liu et al. 2023, Algorithm 1)."""

    lr: float = setting(0.025, above=0)
    """Learning rate of the logits of the weights (Adam)."""
    gamma: float = setting(1e-5, at_least=0)
    """Decay of these logits towards 0, which is added to their gradient."""


@component("balancer", "stch", "trp_scale.methods.balancing.global_losses:Stch")
@dataclass(kw_only=True)
class StchSettings(GlobalLossSettings):
    """Smooth Tchebycheff scalarisation: smoothed maximum of preferred losses (Lin et al. 2024)."""

    mu: float = setting(1.0, above=0)
    """Smoothing of the maximum; the sharpness is 1 / mu."""
    preference: dict[str, float] = setting(dict)
    """Factor of each task's loss by task name, above 0; 1 for other tasks."""
    form: Literal["losses", "logarithms"] = "losses"
    """Maximum of the losses, or of their logarithms, which have no unit. The authors' multi-task experiments use
    logarithms with scale = initial."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        for task, factor in self.preference.items():
            if not 0 < factor < float("inf"):
                yield f"--balancer.preference {task} is {factor:g}; allowed: a number above 0"


@component("balancer", "uncertainty", "trp_scale.methods.balancing.uncertainty:Uncertainty")
@dataclass(kw_only=True)
class UncertaintySettings(RatioSettings):
    """A learned variance per task (Kendall et al. 2018). The weights have no fixed sum."""

    form: Literal["multimae", "kendall"] = setting("multimae")
    """multimae: sum of exp(-s) L + s. kendall: L / (2 sigma^2) for regression, L / sigma^2 for classification, plus
    log sigma, where s = log sigma^2."""
    lr: float = setting(1e-3, above=0)
    """Learning rate of s (Adam without decay)."""


@component("balancer", "gradnorm", "trp_scale.methods.balancing.gradnorm:GradNorm")
@dataclass(kw_only=True)
class GradNormSettings(FixedSumSettings, RatioSettings, TapSettings):
    """Weights for equal training rates (Chen et al. 2018, Algorithm 1)."""

    alpha: float = setting(1.5, at_least=0)
    """Strength of the force towards equal training rates (Chen et al.)."""
    lr: float = setting(0.025, above=0)
    """Learning rate of the task weights (Adam without decay)."""


@component("balancer", "jd", "trp_scale.methods.balancing.jd:JacobianDescent")
@dataclass(kw_only=True)
class JdSettings(TapSettings):
    """Weights by TorchJD from the inner products of the tasks' gradients in the previous step (Quinton and Rey 2024).
    Needs the extra torchjd. The host computes them: each step waits for the gradients of the previous one."""

    method: Literal["upgrad", "dualproj", "pcgrad", "mgda", "aligned_mtl", "imtl_g", "fairgrad", "cagrad"] = "upgrad"
    """Weighting of TorchJD. upgrad: mean of gradients projected onto their dual cone. dualproj: their mean, projected
    (GEM). mgda: smallest convex combination. fairgrad: alpha = 1. cagrad: c = 0.5; also needs cvxpy and clarabel."""


@component("balancer", "dwa", "trp_scale.methods.balancing.dwa:Dwa")
@dataclass(kw_only=True)
class DwaSettings(FixedSumSettings, RatioSettings):
    """Dynamic weight average: weights from the rate at which losses fall (Liu et al. 2019, section 3.2)."""

    temperature: float = setting(2.0, above=0)
    """Temperature of the softmax over the loss ratios (Liu et al.)."""
    interval_steps: int = setting(0, at_least=0)
    """Number of steps over which losses are averaged; 0 = one epoch (paper)."""
    accumulate: bool = False
    """Sum the loss ratios of all intervals, so that a task whose loss falls slowly gains weight in each of them: the
    weights of GRAPE (Fan et al. 2025), whose step size is 1 / temperature."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        yield from super().cautions(config, steps_per_epoch)
        interval = self.interval_steps or steps_per_epoch
        if interval and 2 * interval >= config.training.steps:
            of_epoch = "" if self.interval_steps else f", an epoch of {interval} steps,"
            yield (
                f"--balancer.interval_steps {self.interval_steps}{of_epoch} leaves no third interval in "
                f"--training.steps {config.training.steps}: all weights stay equal"
            )


describe_metrics(
    "balancer",
    title="Balancer",
    look_for=(
        "The weights: minimax gives most weight to the task with the largest loss. Weights that jump from step to step "
        "depend on few elements; a larger batch or balancer.min_count makes them smoother."
    ),
    plots=[
        MetricPlot(
            title="Effective elements",
            names=("effective_elements",),
            note="Number of equally weighted elements whose mean is as noisy as the balanced loss of the step.",
        ),
    ],
)
