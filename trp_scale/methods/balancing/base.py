"""Base classes of balancers, and the balancers that read no losses: equal weights (TRP eq. 4), weights by number of
elements, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.registry import Settings
from trp_scale.core.batch import TaskLosses
from trp_scale.core.hooks import Balancer, StepContext
from trp_scale.core.run import RunContext, tensor_seed
from trp_scale.data.index import read_fields
from trp_scale.methods.balancing.settings import FixedSumSettings, LossReadingSettings, RandomSettings, UniformSettings


class TaskBalancer(Balancer):
    """Total loss sum_t w_t S_t / n_t. The subclass weighs the balanced tasks, the objective the others."""

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
        """Return the weights of the balanced tasks, 0 elsewhere, [T] float64.

        Args:
            losses: mean losses of the global batch, [T] float64; `None` if the balancer reads none.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement balanced_weights")

    def present(self, counts: Tensor) -> Tensor:
        """Return which balanced tasks have elements, [T] bool."""
        return self.balanced & (counts > 0)

    def scale_total(self, weights: Tensor, counts: Tensor) -> Tensor:
        """Return the weights of the present tasks, 0 elsewhere, [T]; with `total: 1` divided by their sum.

        Args:
            weights: the method's weights of all balanced tasks, [T].
            counts: elements per task, [T].
        """
        present = torch.where(self.present(counts), weights, 0.0)
        assert isinstance(self.settings, FixedSumSettings), "the method has weights of a fixed sum"
        return present if self.settings.total == "paper" else normalise(present)

    def set_weights(self, ctx: StepContext, losses: Tensor | None) -> None:
        """Set the weights of this step, without a gradient."""
        with torch.no_grad():
            ctx.weigh(self.balanced_weights(ctx, losses) + self.objective.outside_weights(ctx.counts))

    def before_step(self, ctx: StepContext) -> None:
        self._last = ctx
        self.set_weights(ctx, None)

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        assert ctx.weights is not None, "weights are set before the total is computed"
        return (ctx.weights / ctx.counts.clamp(min=1) * losses.sums).sum()

    def metrics(self) -> Mapping[str, Any]:
        """Return `kind` and `effective_elements`: (sum_t w_t)^2 / sum_t (w_t^2 / n_t) over the balanced tasks, the
        number of equally weighted elements whose mean is as noisy as the balanced loss of this step."""
        return {"kind": self.settings.kind, "effective_elements": self.effective_elements()}

    def effective_elements(self) -> float | None:
        ctx = self._last
        if ctx is None or ctx.weights is None:
            return None
        weights = torch.where(self.present(ctx.counts), ctx.weights, 0.0)
        noise = (weights.square() / ctx.counts.clamp(min=1)).sum()
        return float(weights.sum().square() / noise) if float(noise) > 0 else None

    def by_task(self, values: Tensor) -> dict[str, float]:
        """Return the values [T] of the balanced tasks by name, for the metrics."""
        listed = values.tolist()
        return {self.objective.tasks[position]: listed[position] for position in self.objective.balanced}


def normalise(values: Tensor) -> Tensor:
    """Divide values by their sum; all zeros stay zeros."""
    total = values.sum()
    return torch.where(total > 0, values / total.clamp(min=torch.finfo(values.dtype).tiny), values)


SMALLEST_EXCESS = 1e-3
"""Lower bound of a loss minus its reference, for methods that divide by it or take its logarithm."""
SMALLEST_LOSS = 1e-12
"""Lower bound of a loss without a reference; avoids a division by 0."""


class LossReadingBalancer(TaskBalancer):
    """Reads losses unscaled, divided by their first value, or minus a reference (`balancer.scale`). TRP eq. 7 compares
    unscaled pixels with nats. Only the weights depend on `scale`; the total loss uses unscaled losses.
    """

    settings: LossReadingSettings

    def __init__(self, settings: LossReadingSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        tasks, losses, flag = self.objective.tasks, settings.reference, "balancer.reference"
        if settings.reference_file:
            losses, flag = read_reference(Path(settings.reference_file)), "balancer.reference_file"
            if missing := [tasks[task] for task in self.objective.balanced if tasks[task] not in losses]:
                raise RefusedError(f"{flag} {settings.reference_file} has no loss of {missing}, which are balanced")
            run.data_group.require_equal(str(sorted(losses.items())), f"{flag} {settings.reference_file}")
        self.reference = self.vector_from_names(losses, 0.0, flag)
        # NaN marks a task not seen so far.
        self.first_losses = self.vector(torch.nan)

    def vector(self, value: float) -> Tensor:
        """Return [T] float64 filled with `value`."""
        return torch.full((len(self.objective.tasks),), value, dtype=torch.float64, device=self.device)

    def vector_from_names(self, values: Mapping[str, float], default: float, flag: str) -> Tensor:
        """Return the values of the tasks, [T] float64; raise RefusedError with the flag for unknown tasks."""
        tasks = self.objective.tasks
        if unknown := sorted(set(values) - set(tasks)):
            raise RefusedError(f"{flag} names unknown tasks {unknown}; allowed: {list(tasks)}")
        return torch.tensor([values.get(task, default) for task in tasks], dtype=torch.float64).to(self.device)

    def scale_losses(self, losses: Tensor) -> Tensor:
        """Return the losses [T] scaled by `balancer.scale`."""
        if self.settings.scale == "initial":
            first = torch.where(self.first_losses.isnan(), losses, self.first_losses)
            return losses / first.clamp(min=SMALLEST_LOSS)  # segmentation with a single class starts at 0
        return losses - self.reference if self.settings.scale == "reference" else losses

    def remaining_losses(self, losses: Tensor) -> Tensor:
        """Return the scaled losses [T], clamped above 0; at most the reference counts as SMALLEST_EXCESS above it."""
        smallest = SMALLEST_EXCESS if self.settings.scale == "reference" else SMALLEST_LOSS
        return self.scale_losses(losses).clamp(min=smallest)

    def excess(self, losses: Tensor) -> Tensor:
        """Return the losses [T] above their references, clamped above 0; unscaled without `scale: reference`."""
        return self.remaining_losses(losses) if self.settings.scale == "reference" else losses.clamp(min=SMALLEST_LOSS)

    def after_step(self, ctx: StepContext) -> None:
        first = torch.where(self.first_losses.isnan() & (ctx.counts > 0), ctx.losses, self.first_losses)
        self.first_losses = ctx.commit(first, self.first_losses)

    def losses_read(self) -> Tensor | None:
        """Return the losses [T] that the last weights or state were computed from, NaN for absent tasks; `None` before
        the first step."""
        if self._last is None or self._last.sums is None:
            return None
        return torch.where(self._last.counts > 0, self._last.means(self._last.sums), torch.nan)

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of all balancers, and the `scaled` losses if `balancer.scale` is set."""
        values = dict(super().metrics())
        losses = self.losses_read()
        if self.settings.scale != "none" and losses is not None:
            values["scaled"] = self.by_task(self.scale_losses(losses))
        return values

    def state_dict(self) -> dict[str, Any]:
        reference = {"reference": self.reference.cpu()} if self.settings.reference_file else {}
        return {"first_losses": self.first_losses.cpu(), **reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "reference" in state and not torch.equal(state["reference"], self.reference.cpu()):
            raise RefusedError(
                f"--balancer.reference_file {self.settings.reference_file} has changed since the checkpoint; restore "
                "the file, or start a new run"
            )
        self.first_losses = state["first_losses"].to(self.device)


def read_reference(path: Path) -> dict[str, float]:
    """Read the losses of a file of `trp-scale reference`, by task."""
    losses: dict[str, float] = read_fields(path).take("losses", dict[str, float])
    return losses


BETAS = (0.9, 0.999)
EPS = 1e-8


class TaskAdam:
    """Adam (Kingma & Ba, Algorithm 1) for one value per task; equal to torch.optim.Adam with one 0-dimensional
    parameter per task, without decay.

    torch.optim.Adam skips a parameter only if the host sees that its gradient is `None`. Here only the device knows
    which tasks are absent; the moments and step counts of these do not change.

    Args:
        like: zeros on the device, [T] float64.
    """

    def __init__(self, like: Tensor, lr: float) -> None:
        self.lr = lr
        self.steps, self.first_moments, self.second_moments = (torch.zeros_like(like) for _ in range(3))

    def step(self, values: Tensor, gradient: Tensor, moving: Tensor) -> Tensor:
        """Return the values [T] after a step down their gradient [T]; only those in `moving`, [T] bool, change."""
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
    """Equal weights of all balanced tasks. With `total: 1` those of the tasks in the global batch sum to 1; with
    `paper` each weight is 1/T, or 1 with `form: sum`, even if tasks are absent."""

    settings: UniformSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        divided = self.settings.total == "paper" and self.settings.form == "mean"
        counted = self.balanced.double()
        return self.scale_total(counted / counted.sum().clamp(min=1) if divided else counted, ctx.counts)


class Proportional(TaskBalancer):
    """w_t = n_t / sum of n over the balanced tasks: the mean over all elements (loss of plain BERT)."""

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        return normalise(torch.where(self.balanced, ctx.counts, 0.0))


class RandomWeights(TaskBalancer):
    """softmax(z / temperature) over the present tasks, z standard normal (Lin et al. 2022, RLW). The host draws z from
    (seed, step), so all ranks, engines and resumed runs have the same z."""

    settings: RandomSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(tensor_seed(self.run.seed, f"random weights/{ctx.step}"))
        draws = torch.randn(len(self.objective.tasks), generator=generator, dtype=torch.float64)  # [T]
        present = self.present(ctx.counts)
        scores = torch.where(present, draws.to(self.device, non_blocking=True) / self.settings.temperature, -torch.inf)
        return torch.where(present, torch.softmax(scores, dim=0), 0.0)  # no task: softmax of all -inf is NaN
