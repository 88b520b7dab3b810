"""Bases of all balancers and of those that read losses, and the balancers that read none: equal weights (TRP eq. 4),
weights by number of elements, random ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.settings import Settings
from trp_scale.core.batch import TaskLosses
from trp_scale.core.hooks import Balancer, StepContext
from trp_scale.core.run import RunContext
from trp_scale.core.seeds import tensor_seed
from trp_scale.methods.balancing.settings import FixedSumSettings, LossReadingSettings, RandomSettings, UniformSettings


class TaskBalancer(Balancer):
    """Total loss sum_t w_t S_t / n_t: w from a subclass for the balanced tasks, from the objective for the others.

    Args:
        settings: of this kind of balancer.
        run: whose objective says which tasks are balanced, and what the others weigh.
    """

    name = "balancer"

    def __init__(self, settings: Settings, run: RunContext) -> None:
        self.settings = settings
        self.run = run
        self.objective = run.objective
        self.device = run.device
        self.balanced = torch.zeros(len(self.objective.tasks), dtype=torch.bool, device=self.device)
        self.balanced[list(self.objective.balanced)] = True
        self._last: StepContext | None = None

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        """[T] float64: weights of the balanced tasks, 0 elsewhere.

        Args:
            ctx: the step.
            losses: [T] float64 mean losses of the global batch, or None where the balancer needs none.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it weighs tasks")

    def present(self, counts: Tensor) -> Tensor:
        """[T] bool: the balanced tasks that have elements."""
        return self.balanced & (counts > 0)

    def scale_total(self, weights: Tensor, counts: Tensor) -> Tensor:
        """[T] the present tasks' weights, 0 elsewhere: with `total: 1` divided by their sum, with `paper` as they are.

        Args:
            weights: [T] the method's own, for all balanced tasks.
            counts: [T] elements.
        """
        present = torch.where(self.present(counts), weights, 0.0)
        assert isinstance(self.settings, FixedSumSettings), "of methods whose weights have a fixed sum"
        return present if self.settings.total == "paper" else normalise(present)

    def set_weights(self, ctx: StepContext, losses: Tensor | None) -> None:
        """Fix the weights of this step; no gradient flows through them."""
        with torch.no_grad():
            ctx.weigh(self.balanced_weights(ctx, losses) + self.objective.outside_weights(ctx.counts))

    def before_step(self, ctx: StepContext) -> None:
        self._last = ctx
        self.set_weights(ctx, None)

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        assert ctx.weights is not None, "weights are set before the total is asked for"
        return (ctx.weights / ctx.counts.clamp(min=1) * losses.sums).sum()

    def metrics(self) -> Mapping[str, Any]:
        """kind, and effective_elements: (sum_t w_t)^2 / sum_t (w_t^2 / n_t) over the balanced tasks, the number of
        equally weighted elements whose mean would be as noisy as this step's balanced loss."""
        return {"kind": self.settings.kind, "effective_elements": self.effective_elements()}

    def effective_elements(self) -> float | None:
        ctx = self._last
        if ctx is None or ctx.weights is None:
            return None
        weights = torch.where(self.present(ctx.counts), ctx.weights, 0.0)
        noise = (weights.square() / ctx.counts.clamp(min=1)).sum()
        return float(weights.sum().square() / noise) if float(noise) > 0 else None

    def by_task(self, values: Tensor) -> dict[str, float]:
        """[T] -> the balanced tasks' values by name, for the metrics."""
        listed = values.tolist()
        return {self.objective.tasks[position]: listed[position] for position in self.objective.balanced}


def normalise(values: Tensor) -> Tensor:
    """Values divided by their sum; zeros stay zeros when nothing is there."""
    total = values.sum()
    return torch.where(total > 0, values / total.clamp(min=torch.finfo(values.dtype).tiny), values)


SMALLEST_EXCESS = 1e-3
"""Least that is left of a loss above its reference, for methods that divide by it or take its logarithm."""
SMALLEST_LOSS = 1e-12
"""The same for losses that no reference is subtracted from: only a loss of exactly 0 is kept from being divided by."""


class LossReadingBalancer(TaskBalancer):
    """Reads losses as they are, over their first value, or minus a reference (`balancer.scale`). Eq. 7 of TRP compares
    pixels with nats as they are.

    The total is of the losses as they are; `scale` decides what the weights are made of.
    """

    settings: LossReadingSettings

    def __init__(self, settings: LossReadingSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        tasks = self.objective.tasks
        if unknown := sorted(set(settings.reference) - set(tasks)):
            raise RefusedError(f"balancer.reference names {unknown}; the tasks are {list(tasks)}")
        reference = [settings.reference.get(task, 0.0) for task in tasks]
        self.reference = torch.tensor(reference, dtype=torch.float64).to(self.device)
        # NaN marks a task that was never seen.
        self.first_losses = self.vector(torch.nan)

    def vector(self, value: float) -> Tensor:
        """[T] float64 of one value."""
        return torch.full((len(self.objective.tasks),), value, dtype=torch.float64, device=self.device)

    def scale_losses(self, losses: Tensor) -> Tensor:
        """[T] losses as the balancer reads them."""
        if self.settings.scale == "initial":
            first = torch.where(self.first_losses.isnan(), losses, self.first_losses)
            return losses / first.clamp(min=SMALLEST_LOSS)  # segmentation into a single class begins at 0
        return losses - self.reference if self.settings.scale == "reference" else losses

    def remaining_losses(self, losses: Tensor) -> Tensor:
        """[T] the same, kept above 0: a loss at its reference or below counts as SMALLEST_EXCESS above it."""
        smallest = SMALLEST_EXCESS if self.settings.scale == "reference" else SMALLEST_LOSS
        return self.scale_losses(losses).clamp(min=smallest)

    def after_step(self, ctx: StepContext) -> None:
        first = torch.where(self.first_losses.isnan() & (ctx.counts > 0), ctx.losses, self.first_losses)
        self.first_losses = ctx.commit(first, self.first_losses)

    def losses_read(self) -> Tensor | None:
        """[T] losses that the last weights or state were made of, NaN where there are none; None before any step."""
        if self._last is None or self._last.sums is None:
            return None
        return torch.where(self._last.counts > 0, self._last.means(self._last.sums), torch.nan)

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of all balancers, and `scaled`: the scaled losses, if scaling is on."""
        values = dict(super().metrics())
        losses = self.losses_read()
        if self.settings.scale != "none" and losses is not None:
            values["scaled"] = self.by_task(self.scale_losses(losses))
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"first_losses": self.first_losses.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_losses = state["first_losses"].to(self.device)


BETAS = (0.9, 0.999)
EPS = 1e-8


class TaskAdam:
    """Adam (Kingma & Ba, Algorithm 1) for a balancer's own numbers: that of torch.optim.Adam with one 0-dimensional
    parameter per task, without decay.

    torch's own leaves a parameter alone only if the host knows that it has no gradient; which tasks are absent is known
    on the device, and the host would have to wait for it. An absent task's moments and step count stay as they are.

    Args:
        like: [T] float64 zeros on the device.
        lr: learning rate.
    """

    def __init__(self, like: Tensor, lr: float) -> None:
        self.lr = lr
        self.steps, self.first_moments, self.second_moments = (torch.zeros_like(like) for _ in range(3))

    def step(self, values: Tensor, gradient: Tensor, moving: Tensor) -> Tensor:
        """[T] values a step down their gradient [T] where `moving` [T] bool; the others as they are."""
        beta1, beta2 = BETAS
        self.steps = self.steps + moving
        mean = torch.lerp(self.first_moments, gradient, 1 - beta1)
        square = beta2 * self.second_moments + (1 - beta2) * gradient.square()
        self.first_moments = torch.where(moving, mean, self.first_moments)
        self.second_moments = torch.where(moving, square, self.second_moments)
        root = square.sqrt() / (1 - beta2**self.steps).sqrt() + EPS
        return torch.where(moving, values - self.lr / (1 - beta1**self.steps) * mean / root, values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps.cpu(),
            "first_moments": self.first_moments.cpu(),
            "second_moments": self.second_moments.cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.steps.device
        self.steps, self.first_moments, self.second_moments = (
            state[name].to(device) for name in ("steps", "first_moments", "second_moments")
        )


class Uniform(TaskBalancer):
    """Equal weight for every balanced task: with `total: 1` they sum to 1 over the tasks present in the global
    batch; with `paper` each has 1/T, or 1 with `form: sum`, whoever is absent."""

    settings: UniformSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        divided = self.settings.total == "paper" and self.settings.form == "mean"
        counted = self.balanced.double()
        return self.scale_total(counted / counted.sum().clamp(min=1) if divided else counted, ctx.counts)


class Proportional(TaskBalancer):
    """w_t = n_t / sum of n over the balanced tasks: the mean over all elements (plain BERT's loss)."""

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        return normalise(torch.where(self.balanced, ctx.counts, 0.0))


class RandomWeights(TaskBalancer):
    """softmax(z / temperature) over the present tasks, z standard normal (Lin et al. 2022, RLW): drawn from (seed,
    step) on the host, so that all ranks, engines and resumed runs have the same."""

    settings: RandomSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(tensor_seed(self.run.seed, f"random weights/{ctx.step}"))
        draws = torch.randn(len(self.objective.tasks), generator=generator, dtype=torch.float64)  # [T]
        present = self.present(ctx.counts)
        scores = torch.where(present, draws.to(self.device, non_blocking=True) / self.settings.temperature, -torch.inf)
        return torch.where(present, torch.softmax(scores, dim=0), 0.0)  # no task: softmax of all -inf is NaN
