"""Minimax weights: softmax of alpha x loss over the tasks (TRP Algorithm 1, eq. 7)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.batch import StepStats, TaskLosses
from trp_scale.config import BalancerConfig, RefusedError
from trp_scale.hooks.balancing.base import TaskBalancer
from trp_scale.hooks.base import StepContext
from trp_scale.objectives.base import Objective

logger = logging.getLogger(__name__)

FEW_ELEMENTS = 16
"""Fewer effective elements than this, and a step follows the noise of a handful of words: warned about."""


def theorem_alpha(step: int, *, tasks: int, radius: float, lipschitz: float, bound: float) -> float:
    """alpha_k = max(0, 4 sqrt(k+1) / (R0 L') * log(4 T B sqrt(k+1) / (R0 L'))) (TRP Theorem 3.1)."""
    ratio = math.sqrt(step + 1) / (radius * lipschitz)
    return max(0.0, 4.0 * ratio * math.log(4.0 * tasks * bound * ratio))


def softmax_weights(losses: Tensor, alpha: float, eligible: Tensor) -> Tensor:
    """[T] weights of TRP eq. 7 over the eligible tasks, 0 elsewhere; alpha = inf gives the worst task alone, or equal
    shares where several are the worst, as the softmax does in the limit.

    Args:
        losses: [T] mean losses; entries that are not eligible are not read.
        alpha: sharpness, >= 0.
        eligible: [T] bool; with none, all weights are 0.
    """
    if math.isinf(alpha):
        worst = eligible & (losses == torch.where(eligible, losses, -torch.inf).max())
        return worst.to(losses.dtype) / worst.sum().clamp(min=1)
    scores = torch.where(eligible, alpha * losses, -torch.inf)
    weights = torch.softmax(scores, dim=0)
    return torch.where(eligible, weights, 0.0)  # no eligible task: softmax of all -inf is NaN, replaced here


class Minimax(TaskBalancer):
    """Weights of the global batch's losses.

    Estimates: `exact` uses the losses of this very batch (with one micro-batch from the same forward pass, otherwise
    from a pass without gradients that sees the same masks and dropout); `lagged` those of the last step each task was
    seen in, uniform at the first step; `micro` those of each micro-batch alone, which is not the algorithm.
    """

    def __init__(self, config: BalancerConfig, objective: Objective, device: torch.device) -> None:
        super().__init__(config, objective, device)
        if unknown := sorted(set(config.reference) - set(objective.tasks)):
            raise RefusedError(f"balancer.reference names {unknown}; the tasks are {list(objective.tasks)}")
        size = len(objective.tasks)
        reference = [config.reference.get(task, 0.0) for task in objective.tasks]
        self.reference = torch.tensor(reference, dtype=torch.float64).to(device)
        # NaN marks a task that was never seen.
        self.last_losses = torch.full((size,), torch.nan, dtype=torch.float64, device=device)
        self.first_losses = self.last_losses.clone()
        self._warned_at = -(10**9)
        self._micro_weights = torch.zeros(size, dtype=torch.float64, device=device)

    def alpha(self, step: int) -> float:
        """Sharpness at a step."""
        if self.config.alpha_schedule == "hard":
            return math.inf
        if self.config.alpha_schedule == "theorem":
            return theorem_alpha(
                step,
                tasks=len(self.objective.balanced),
                radius=self.config.radius,
                lipschitz=self.config.lipschitz,
                bound=self.config.bound,
            )
        return self.config.alpha

    def scores(self, losses: Tensor) -> Tensor:
        """[T] what enters the softmax: losses as they are, over their first value, or minus a reference."""
        if self.config.scale == "initial":
            return losses / torch.where(self.first_losses.isnan(), losses, self.first_losses)
        return losses - self.reference if self.config.scale == "reference" else losses

    def smoothed(self, losses: Tensor) -> Tensor:
        """[T] loss_ema x last + (1 - loss_ema) x losses; a task's first loss stands for itself."""
        keep = self.config.loss_ema
        return torch.where(self.last_losses.isnan(), losses, keep * self.last_losses + (1 - keep) * losses)

    def eligible(self, counts: Tensor) -> Tensor:
        """[T] bool: balanced, present, with min_count elements; when min_count leaves none, all that are present."""
        present = self.balanced & (counts > 0)
        enough = present & (counts >= self.config.min_count)
        return torch.where(enough.any(), enough, present)

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        eligible = self.eligible(ctx.counts)
        if losses is None:  # lagged
            return softmax_weights(self._lagged_scores(), self.alpha(ctx.step), eligible)
        return softmax_weights(self.scores(self.smoothed(losses)), self.alpha(ctx.step), eligible)

    def _lagged_scores(self) -> Tensor:
        """[T] scores of the last losses; a task that comes for the first time enters with the mean of the others',
        neither pushed nor held back. Before any is known all scores are 0, and the step is uniform."""
        scores = self.scores(self.last_losses)
        known = self.balanced & ~self.last_losses.isnan()
        mean = torch.where(known, scores, 0.0).sum() / known.sum().clamp(min=1)
        return torch.where(known, scores, mean)

    def before_step(self, ctx: StepContext) -> None:
        self._last = ctx
        if self.config.estimate == "lagged":
            self.set_weights(ctx, None)
        elif self.config.estimate == "micro":
            self._micro_weights.zero_()
        elif len(ctx.window) > 1:
            ctx.sums = self.prepass(ctx)
            self.set_weights(ctx, ctx.means(ctx.sums))

    @staticmethod
    def prepass(ctx: StepContext) -> Tensor:
        """[T] loss sums of the global batch, without gradients; the weighted pass repeats it bit for bit."""
        with torch.no_grad():
            return ctx.data_group.sum(torch.stack([ctx.losses_of(micro).sums for micro in ctx.window]).sum(0))  # type: ignore[no-any-return]

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        if self.config.estimate == "micro":
            return self._micro_total(ctx, losses)
        if ctx.weights is None:  # exact with one micro-batch: the weights come out of the pass that is weighted
            ctx.sums = ctx.data_group.sum(losses.sums)
            self.set_weights(ctx, ctx.means(ctx.sums))
        return super().total(ctx, losses)

    def _micro_total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """The mean over micro-batches and ranks of each one's own softmax-weighted mean losses."""
        with torch.no_grad():
            means = losses.sums / losses.counts.clamp(min=1)
            weights = softmax_weights(self.scores(means), self.alpha(ctx.step), self.eligible(losses.counts))
            weights = weights + self.objective.outside_weights(losses.counts)
            parts = len(ctx.window) * ctx.data_group.size
            self._micro_weights += weights / parts
        return (weights / losses.counts.clamp(min=1) * losses.sums).sum() / parts

    def gradients(self, ctx: StepContext) -> None:
        if self.config.estimate == "micro":
            ctx.weights = ctx.data_group.sum(self._micro_weights)  # what each task's loss counted on average

    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        if not stats.applied or ctx.sums is None:
            return
        losses = torch.where(ctx.counts > 0, ctx.means(ctx.sums), torch.nan)
        self.first_losses = torch.where(self.first_losses.isnan(), losses, self.first_losses)
        self.last_losses = torch.where(losses.isnan(), self.last_losses, self.smoothed(losses))

    def metrics(self) -> Mapping[str, Any]:
        ctx = self._last
        if ctx is None or ctx.weights is None:
            return {"kind": "minimax"}
        effective = self.effective_elements()
        if effective is not None and effective < FEW_ELEMENTS and ctx.step >= self._warned_at + 1000:
            self._warned_at = ctx.step
            logger.warning(
                "step %d: the balanced loss rests on %.1f effective elements; a larger --batch.global_size, "
                "--balancer.min_count, --balancer.loss_ema or a smaller --balancer.alpha steadies it",
                ctx.step + 1,
                effective,
            )
        values: dict[str, Any] = {
            "kind": "minimax",
            "estimate": self.config.estimate,
            "alpha": self.alpha(ctx.step),
            "effective_elements": effective,
        }
        if self.config.scale != "none":
            scaled = self.scores(self.last_losses).tolist()
            values["scaled"] = dict(zip(self.objective.tasks, scaled, strict=True))
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"last_losses": self.last_losses.cpu(), "first_losses": self.first_losses.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_losses = state["last_losses"].to(self.device)
        self.first_losses = state["first_losses"].to(self.device)
