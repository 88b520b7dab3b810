"""Balancers whose weights depend on the losses of the global batch: estimates of these losses, minimax (TRP Algorithm
1, eq. 7), group DRO (Sagawa et al.) and smooth Tchebycheff (Lin et al.)."""

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
from trp_scale.methods.balancing.base import LossReadingBalancer, normalise
from trp_scale.methods.balancing.settings import GlobalLossSettings, GroupDroSettings, MinimaxSettings, StchSettings

logger = logging.getLogger(__name__)

FEW_ELEMENTS = 16
"""Warn below this number of effective elements: the step then depends on the noise of a few words."""


class GlobalLossBalancer(LossReadingBalancer):
    """Weights from the losses of the global batch.

    Estimates: `exact` uses the losses of this batch, from the same forward pass if there is one micro-batch, else from
    an extra pass without gradients and with the same masks and dropout. `lagged` uses the losses of earlier steps,
    uniform weights in the first. `micro` uses the losses of each micro-batch alone, which is not the algorithm.
    """

    settings: GlobalLossSettings

    steadier: ClassVar[str]
    """Flags that reduce the noise of the weights."""

    def __init__(self, settings: GlobalLossSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self.last_losses = self.vector(torch.nan)  # NaN marks a task not seen so far
        self._warned_at = -(10**9)
        self._micro_weights = self.vector(0.0)

    def task_weights(self, ctx: StepContext, losses: Tensor, counts: Tensor, eligible: Tensor) -> Tensor:
        """Return the weights of the eligible tasks, which sum to 1, 0 elsewhere, [T].

        Args:
            losses: mean losses, smoothed but not scaled, [T]; undefined for other tasks.
            counts: elements per task, [T].
            eligible: [T] bool; if empty, all weights are 0.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement task_weights")

    def lagged_weights(self, ctx: StepContext, eligible: Tensor) -> Tensor:
        """Return the weights of the eligible tasks from the state before this step, [T]."""
        raise NotImplementedError(f"{type(self).__name__} must implement lagged_weights")

    def smooth(self, losses: Tensor) -> Tensor:
        """Return loss_ema x last + (1 - loss_ema) x losses, [T]; the first loss of a task is not smoothed."""
        keep = self.settings.loss_ema
        return torch.where(self.last_losses.isnan(), losses, keep * self.last_losses + (1 - keep) * losses)

    def fill_unseen(self, values: Tensor) -> Tensor:
        """Return values [T] with the mean over the tasks seen so far for the others; 0 before the first step."""
        known = self.balanced & ~self.last_losses.isnan()
        mean = torch.where(known, values, 0.0).sum() / known.sum().clamp(min=1)
        return torch.where(known, values, mean)

    def eligible(self, counts: Tensor) -> Tensor:
        """Return the present tasks with at least min_count elements, [T] bool; if none has, all present tasks."""
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
        """Return the loss sums [T] of the global batch, without gradients. The weighted pass repeats it bit for bit."""
        with torch.no_grad():
            return ctx.gather_sums(torch.stack([ctx.compute_losses(micro).sums for micro in ctx.window]).sum(0))

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        if self.settings.estimate == "micro":
            return self._micro_total(ctx, losses)
        if ctx.weights is None:  # exact with one micro-batch: the weighted pass itself gives the losses
            self.set_weights(ctx, ctx.means(ctx.gather_sums(losses.sums)))
        return super().total(ctx, losses)

    def _micro_total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """Return the mean over micro-batches and ranks of their balanced losses, each weighted by its own losses."""
        with torch.no_grad():
            means = losses.sums / losses.counts.clamp(min=1)
            eligible = self.eligible(ctx.counts) & (losses.counts > 0)  # min_count applies to the global batch
            weights = self.task_weights(ctx, means, losses.counts, eligible)
            weights = weights + self.objective.outside_weights(losses.counts)
            parts = len(ctx.window) * ctx.data_group.size
            self._micro_weights += weights / parts
        return (weights / losses.counts.clamp(min=1) * losses.sums).sum() / parts

    def gradients(self, ctx: StepContext) -> None:
        if self.settings.estimate == "micro":
            ctx.weigh(ctx.data_group.sum(self._micro_weights))  # mean weight of each task's loss

    def after_step(self, ctx: StepContext) -> None:
        super().after_step(ctx)
        last = torch.where(ctx.counts > 0, self.smooth(ctx.losses), self.last_losses)
        self.last_losses = ctx.commit(last, self.last_losses)

    def losses_read(self) -> Tensor | None:
        return self.last_losses

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of all balancers and `estimate`; warn about few effective elements."""
        ctx = self._last
        if ctx is None or ctx.weights is None:
            return {"kind": self.settings.kind}
        values = {**super().metrics(), "estimate": self.settings.estimate}
        effective = values["effective_elements"]
        if effective is not None and effective < FEW_ELEMENTS and ctx.step >= self._warned_at + 1000:
            self._warned_at = ctx.step
            logger.warning(
                "step %d: the balanced loss has only %.1f effective elements, so its weights are noisy; to reduce the "
                "noise use a larger --batch.global_size, %s",
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
    """Return sharpness / standard deviation of the eligible losses, 0-dimensional; 0 if all are equal.

    Args:
        losses: [T]; only eligible entries are read.
        eligible: [T] bool.
    """
    count = eligible.sum().clamp(min=1)
    mean = torch.where(eligible, losses, 0.0).sum() / count
    deviation = (torch.where(eligible, losses - mean, 0.0).square().sum() / count).sqrt()
    return torch.where(deviation > 0, sharpness / deviation, 0.0)


def softmax_weights(losses: Tensor, alpha: float | Tensor, eligible: Tensor) -> Tensor:
    """Return the weights of TRP eq. 7 over the eligible tasks, 0 elsewhere, [T]. alpha = inf is the limit of the
    softmax: equal weights of the tasks with the largest loss.

    Args:
        losses: mean losses, [T]; only eligible entries are read.
        alpha: sharpness >= 0; finite if a tensor.
        eligible: [T] bool; if empty, all weights are 0.
    """
    if not isinstance(alpha, Tensor) and math.isinf(alpha):
        worst = eligible & (losses == torch.where(eligible, losses, -torch.inf).max())
        return worst.to(losses.dtype) / worst.sum().clamp(min=1)
    scores = torch.where(eligible, alpha * losses, -torch.inf)
    weights = torch.softmax(scores, dim=0)
    return torch.where(eligible, weights, 0.0)  # also replaces NaN, the softmax if no task is eligible


class Minimax(GlobalLossBalancer):
    """TRP eq. 7 on the losses of the global batch. `lagged` uses those of the last step in which a task was present."""

    settings: MinimaxSettings

    steadier = "--balancer.min_count, --balancer.loss_ema or a smaller --balancer.alpha"

    def __init__(self, settings: MinimaxSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self._alpha: float | Tensor = 0.0  # of the last weights

    def alpha(self, step: int) -> float:
        """Return the sharpness at a step, before the division by the spread of the losses."""
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
        """Return softmax weights. A task not seen so far gets the mean score of the others. Before the first step all
        scores are 0 and the weights uniform."""
        return self._softmax(ctx, self.fill_unseen(self.scale_losses(self.last_losses)), eligible)

    def metrics(self) -> Mapping[str, Any]:
        values = dict(super().metrics())
        if self._last is not None and self._last.weights is not None:
            values["alpha"] = float(self._alpha)
        return values


class GroupDro(GlobalLossBalancer):
    """Sagawa et al., Algorithm 1: q_t <- q_t exp(rate (L_t + C / sqrt(n_t))), normalised; q weighs the batch.

    An absent task, or one below min_count, keeps its q and gets no weight. The update redistributes only the sum of the
    other q, which are normalised to give the weights. (A loss of 0 for absent tasks would drive the q of rare tasks
    down.) `lagged` weighs the batch by q before the update; `micro` weighs each micro-batch by q updated with its own
    losses. The losses of the global batch always update q.
    """

    settings: GroupDroSettings

    steadier = "--balancer.min_count, --balancer.loss_ema or a smaller --balancer.rate"

    def __init__(self, settings: GroupDroSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        # Logarithms: a share of e^-1000 can recover, a share rounded to 0 cannot.
        start = -math.log(max(1, len(self.objective.balanced)))
        self.log_shares = torch.where(self.balanced, start, self.vector(-torch.inf))
        self.group_sizes = None
        if settings.adjustment and settings.group_sizes == "data_set":
            train = run.sources.train
            batch = train.first_rows(min(2048, train.rows)).to(self.device)
            self.group_sizes = self.objective.count(batch) * (train.rows / batch.rows)  # [T]

    def raise_weights(self, losses: Tensor, counts: Tensor) -> Tensor:
        """Return log q + rate (scaled loss + C / sqrt(n)), not normalised, [T]."""
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
        super().after_step(ctx)  # last, because the losses above are smoothed and scaled with the earlier state

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics and `shares` (q). The weights are the normalised shares of present tasks."""
        return {**super().metrics(), "shares": self.by_task(self.log_shares.exp())}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_shares": self.log_shares.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.log_shares = state["log_shares"].to(self.device)


class Stch(GlobalLossBalancer):
    """Smooth Tchebycheff scalarisation (Lin et al.): descent of mu log sum_t exp(p_t (f_t - z_t) / mu).

    The weights are w_t ~ p_t softmax(p (f - z) / mu)_t f'(L_t), with sum 1.
    p are the preferences, f the losses or their logarithms, z the references of `scale: reference`. With logarithms
    and `scale: initial`, f - z is log(L / L_0), as in the authors' multi-task code, which divides by the mean of an
    early epoch. Equal preferences of 1, losses and references 0 give TRP eq. 7 with alpha = 1 / mu.

    Raises:
        RefusedError: a preference names an unknown task.
    """

    settings: StchSettings

    steadier = "--balancer.min_count, --balancer.loss_ema or a larger --balancer.mu"

    def __init__(self, settings: StchSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self.preference = self.vector_from_names(settings.preference, 1.0, "balancer.preference")  # p

    def values(self, losses: Tensor) -> Tensor:
        """Return f - z, [T]."""
        return self.remaining_losses(losses).log() if self.settings.form == "logarithms" else self.scale_losses(losses)

    def weigh(self, values: Tensor, losses: Tensor, eligible: Tensor) -> Tensor:
        """Return the weights of the eligible tasks, [T], from f - z and the losses, [T] each."""
        shares = self.preference * softmax_weights(self.preference * values, 1.0 / self.settings.mu, eligible)
        return normalise(shares / self.excess(losses) if self.settings.form == "logarithms" else shares)

    def task_weights(self, ctx: StepContext, losses: Tensor, counts: Tensor, eligible: Tensor) -> Tensor:
        return self.weigh(self.values(losses), losses, eligible)

    def lagged_weights(self, ctx: StepContext, eligible: Tensor) -> Tensor:
        values, losses = self.fill_unseen(self.values(self.last_losses)), self.fill_unseen(self.last_losses)
        return self.weigh(values, losses, eligible)
