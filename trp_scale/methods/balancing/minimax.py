"""Minimax weights: softmax of alpha x loss over the tasks (TRP Algorithm 1, eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.global_losses import GlobalLossBalancer
from trp_scale.methods.balancing.settings import MinimaxSettings


def theorem_alpha(step: int, *, tasks: int, radius: float, lipschitz: float, bound: float) -> float:
    """alpha_k = max(0, 4 sqrt(k+1) / (R0 L') * log(4 T B sqrt(k+1) / (R0 L'))) (TRP Theorem 3.1)."""
    ratio = math.sqrt(step + 1) / (radius * lipschitz)
    return max(0.0, 4.0 * ratio * math.log(4.0 * tasks * bound * ratio))


def spread_alpha(losses: Tensor, sharpness: float, eligible: Tensor) -> Tensor:
    """Scalar: sharpness over the standard deviation of the eligible losses; 0 where all are the same.

    Args:
        losses: [T]; entries that are not eligible are not read.
        eligible: [T] bool.
    """
    count = eligible.sum().clamp(min=1)
    mean = torch.where(eligible, losses, 0.0).sum() / count
    deviation = (torch.where(eligible, losses - mean, 0.0).square().sum() / count).sqrt()
    return torch.where(deviation > 0, sharpness / deviation, 0.0)


def softmax_weights(losses: Tensor, alpha: float | Tensor, eligible: Tensor) -> Tensor:
    """[T] weights of TRP eq. 7 over the eligible tasks, 0 elsewhere; alpha = inf gives the worst task alone, or equal
    shares where several are the worst, as the softmax does in the limit.

    Args:
        losses: [T] mean losses; entries that are not eligible are not read.
        alpha: sharpness, >= 0; a scalar tensor is finite.
        eligible: [T] bool; with none, all weights are 0.
    """
    if not isinstance(alpha, Tensor) and math.isinf(alpha):
        worst = eligible & (losses == torch.where(eligible, losses, -torch.inf).max())
        return worst.to(losses.dtype) / worst.sum().clamp(min=1)
    scores = torch.where(eligible, alpha * losses, -torch.inf)
    weights = torch.softmax(scores, dim=0)
    return torch.where(eligible, weights, 0.0)  # no eligible task: softmax of all -inf is NaN, replaced here


class Minimax(GlobalLossBalancer):
    """Eq. 7 on the global batch's losses; `lagged` takes those of the last step that each task was seen in."""

    settings: MinimaxSettings

    steadier = "--balancer.min_count, --balancer.loss_ema or a smaller --balancer.alpha"

    def __init__(self, settings: MinimaxSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self._alpha: float | Tensor = 0.0  # of the last weights

    def alpha(self, step: int) -> float:
        """Sharpness at a step, before the spread of its losses divides it."""
        if self.settings.alpha_schedule == "hard":
            return math.inf
        if self.settings.alpha_schedule == "theorem":
            return theorem_alpha(
                step,
                tasks=len(self.objective.balanced),
                radius=self.settings.radius,
                lipschitz=self.settings.lipschitz,
                bound=self.settings.bound,
            )
        return self.settings.alpha

    def task_weights(self, ctx: StepContext, losses: Tensor, counts: Tensor, eligible: Tensor) -> Tensor:
        return self._softmax(ctx, self.scale_losses(losses), eligible)

    def _softmax(self, ctx: StepContext, scores: Tensor, eligible: Tensor) -> Tensor:
        self._alpha = self.alpha(ctx.step)
        if self.settings.alpha_schedule == "spread":
            self._alpha = spread_alpha(scores, self._alpha, eligible)
        return softmax_weights(scores, self._alpha, eligible)

    def lagged_weights(self, ctx: StepContext, eligible: Tensor) -> Tensor:
        """A task that comes for the first time enters with the mean of the others' scores, neither pushed nor held
        back. Before any is known all scores are 0, and the step is uniform."""
        scores = self.scale_losses(self.last_losses)
        known = self.balanced & ~self.last_losses.isnan()
        mean = torch.where(known, scores, 0.0).sum() / known.sum().clamp(min=1)
        return self._softmax(ctx, torch.where(known, scores, mean), eligible)

    def metrics(self) -> Mapping[str, Any]:
        values = dict(super().metrics())
        if self._last is not None and self._last.weights is not None:
            values["alpha"] = float(self._alpha)
        return values
