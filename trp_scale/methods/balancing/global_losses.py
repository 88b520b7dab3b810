"""Balancers whose weights follow from the losses of the global batch they weigh: how those losses are estimated,
minimax (TRP Algorithm 1, eq. 7) and group DRO (Sagawa et al.)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from trp_scale.core.batch import TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.base import LossReadingBalancer
from trp_scale.methods.balancing.settings import GlobalLossSettings, GroupDroSettings, MinimaxSettings

logger = logging.getLogger(__name__)

FEW_ELEMENTS = 16
"""Fewer effective elements than this, and a step follows the noise of a handful of words: warned about."""


class GlobalLossBalancer(LossReadingBalancer):
    """Weights of the global batch's losses.

    Estimates: `exact` uses the losses of this very batch (with one micro-batch from the same forward pass, otherwise
    from a pass without gradients that sees the same masks and dropout); `lagged` what was known before the step,
    uniform at the first one; `micro` the losses of each micro-batch alone, which is not the algorithm.
    """

    settings: GlobalLossSettings

    steadier: ClassVar[str]
    """Flags that make the method lean less on few elements."""

    def __init__(self, settings: GlobalLossSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self.last_losses = self.vector(torch.nan)  # NaN marks a task that was never seen
        self._warned_at = -(10**9)
        self._micro_weights = self.vector(0.0)

    def task_weights(self, ctx: StepContext, losses: Tensor, counts: Tensor, eligible: Tensor) -> Tensor:
        """[T] weights of the eligible tasks, which sum to 1, 0 elsewhere.

        Args:
            ctx: the step.
            losses: [T] mean losses, smoothed but not scaled; those of tasks that are not eligible mean nothing.
            counts: [T] elements that the losses are means of.
            eligible: [T] bool; with none, all weights are 0.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it weighs losses")

    def lagged_weights(self, ctx: StepContext, eligible: Tensor) -> Tensor:
        """[T] weights of the eligible tasks from what was known before this step."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it weighs without losses")

    def smooth(self, losses: Tensor) -> Tensor:
        """[T] loss_ema x last + (1 - loss_ema) x losses; a task's first loss stands for itself."""
        keep = self.settings.loss_ema
        return torch.where(self.last_losses.isnan(), losses, keep * self.last_losses + (1 - keep) * losses)

    def eligible(self, counts: Tensor) -> Tensor:
        """[T] bool: balanced, present, with min_count elements; when min_count leaves none, all that are present."""
        present = self.present(counts)
        enough = present & (counts >= self.settings.min_count)
        return torch.where(enough.any(), enough, present)

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        eligible = self.eligible(ctx.counts)
        if losses is None:  # lagged
            return self.lagged_weights(ctx, eligible)
        return self.task_weights(ctx, self.smooth(losses), ctx.counts, eligible)

    def before_step(self, ctx: StepContext) -> None:
        self._last = ctx
        if self.settings.estimate == "lagged":
            self.set_weights(ctx, None)
        elif self.settings.estimate == "micro":
            self._micro_weights.zero_()
        elif len(ctx.window) > 1:
            self.set_weights(ctx, ctx.means(self.prepass(ctx)))

    @staticmethod
    def prepass(ctx: StepContext) -> Tensor:
        """[T] loss sums of the global batch, without gradients; the weighted pass repeats it bit for bit."""
        with torch.no_grad():
            return ctx.gather_sums(torch.stack([ctx.compute_losses(micro).sums for micro in ctx.window]).sum(0))

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        if self.settings.estimate == "micro":
            return self._micro_total(ctx, losses)
        if ctx.weights is None:  # exact with one micro-batch: the weights come out of the pass that is weighted
            self.set_weights(ctx, ctx.means(ctx.gather_sums(losses.sums)))
        return super().total(ctx, losses)

    def _micro_total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """The mean over micro-batches and ranks of each one's mean losses, weighted by those losses themselves."""
        with torch.no_grad():
            means = losses.sums / losses.counts.clamp(min=1)
            eligible = self.eligible(ctx.counts) & (losses.counts > 0)  # min_count is of the global batch
            weights = self.task_weights(ctx, means, losses.counts, eligible)
            weights = weights + self.objective.outside_weights(losses.counts)
            parts = len(ctx.window) * ctx.data_group.size
            self._micro_weights += weights / parts
        return (weights / losses.counts.clamp(min=1) * losses.sums).sum() / parts

    def gradients(self, ctx: StepContext) -> None:
        if self.settings.estimate == "micro":
            ctx.weigh(ctx.data_group.sum(self._micro_weights))  # what each task's loss counted on average

    def after_step(self, ctx: StepContext) -> None:
        super().after_step(ctx)
        last = torch.where(ctx.counts > 0, self.smooth(ctx.losses), self.last_losses)
        self.last_losses = ctx.commit(last, self.last_losses)

    def losses_read(self) -> Tensor | None:
        return self.last_losses

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of all balancers, and `estimate`."""
        ctx = self._last
        if ctx is None or ctx.weights is None:
            return {"kind": self.settings.kind}
        values = {**super().metrics(), "estimate": self.settings.estimate}
        effective = values["effective_elements"]
        if effective is not None and effective < FEW_ELEMENTS and ctx.step >= self._warned_at + 1000:
            self._warned_at = ctx.step
            logger.warning(
                "step %d: the balanced loss rests on %.1f effective elements; a larger --batch.global_size, %s "
                "steadies it",
                ctx.step + 1,
                effective,
                self.steadier,
            )
        return values

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last_losses": self.last_losses.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.last_losses = state["last_losses"].to(self.device)


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


class GroupDro(GlobalLossBalancer):
    """Sagawa et al., Algorithm 1: q_t <- q_t exp(rate (L_t + C / sqrt(n_t))), normalised; then the batch is weighed by
    q.

    A task that is absent, or below min_count, keeps its q and gets no weight: the others share what they had among
    themselves, and the step's weights are theirs, normalised. (Taking it as a loss of 0, as a product over all tasks
    would, sinks whoever is rare.) With `lagged` the batch is weighed by q as it was before; with `micro` each
    micro-batch by q raised with its own losses. q itself always moves by the losses of the global batch.
    """

    settings: GroupDroSettings

    steadier = "--balancer.min_count, --balancer.loss_ema or a smaller --balancer.rate"

    def __init__(self, settings: GroupDroSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        # Logarithms: a share of e^-1000 comes back, one that was rounded to 0 would not.
        start = -math.log(max(1, len(self.objective.balanced)))
        self.log_shares = torch.where(self.balanced, start, self.vector(-torch.inf))
        self.group_sizes = None
        if settings.adjustment and settings.group_sizes == "data_set":
            train = run.sources.train
            batch = train.first_rows(min(2048, train.rows)).to(self.device)
            self.group_sizes = self.objective.count(batch) * (train.rows / batch.rows)  # [T]

    def raise_weights(self, losses: Tensor, counts: Tensor) -> Tensor:
        """[T] log q + rate (scaled loss + C / sqrt(n)), not normalised."""
        sizes = counts if self.group_sizes is None else self.group_sizes
        adjustment = self.settings.adjustment / sizes.clamp(min=1).sqrt()
        return self.log_shares + self.settings.rate * (self.scale_losses(losses) + adjustment)

    def task_weights(self, ctx: StepContext, losses: Tensor, counts: Tensor, eligible: Tensor) -> Tensor:
        return softmax_weights(self.raise_weights(losses, counts), 1.0, eligible)

    def lagged_weights(self, ctx: StepContext, eligible: Tensor) -> Tensor:
        return softmax_weights(self.log_shares, 1.0, eligible)

    def after_step(self, ctx: StepContext) -> None:
        eligible = self.eligible(ctx.counts)
        raised = self.raise_weights(self.smooth(ctx.losses), ctx.counts)
        held = torch.where(eligible, self.log_shares, -torch.inf).logsumexp(0)
        total = torch.where(eligible, raised, -torch.inf).logsumexp(0)
        shares = torch.where(eligible, raised - total + held, self.log_shares)
        self.log_shares = ctx.commit(shares, self.log_shares)
        super().after_step(ctx)  # now: what was read above is smoothed with, and scaled by, what came before

    def metrics(self) -> Mapping[str, Any]:
        """shares: q, whose present entries, normalised, are the weights."""
        return {**super().metrics(), "shares": self.by_task(self.log_shares.exp())}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_shares": self.log_shares.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.log_shares = state["log_shares"].to(self.device)
