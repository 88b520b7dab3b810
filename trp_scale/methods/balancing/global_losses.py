"""Balancers whose weights follow from the losses of the global batch they weigh: how those losses are estimated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from trp_scale.core.batch import TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.base import LossReadingBalancer
from trp_scale.methods.balancing.settings import GlobalLossSettings

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
