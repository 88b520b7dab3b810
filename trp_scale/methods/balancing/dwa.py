"""Dynamic weight average: weights from the rate at which each task's loss falls (Liu et al., section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.base import LossReadingBalancer
from trp_scale.methods.balancing.settings import DwaSettings


@dataclass(frozen=True, kw_only=True)
class IntervalMeans:
    """Mean losses of intervals of steps, [T] float64 each.

    Attributes:
        interval: number of the current interval, from 0.
        sums: sums of the losses of its applied steps.
        steps: number of these steps in which each task was present.
        last: means of the previous interval; NaN for a task not seen so far.
        earlier: means of the interval before that.
    """

    interval: int
    sums: Tensor
    steps: Tensor
    last: Tensor
    earlier: Tensor

    def interval_means(self, interval: int) -> IntervalMeans:
        """Return the means in this or a later interval. An interval without a task keeps the task's means."""
        if interval == self.interval:
            return self
        seen = self.steps > 0
        return IntervalMeans(
            interval=interval,
            sums=torch.zeros_like(self.sums),
            steps=torch.zeros_like(self.steps),
            last=torch.where(seen, self.sums / self.steps.clamp(min=1), self.last),
            earlier=torch.where(seen, self.last, self.earlier),
        )


class Dwa(LossReadingBalancer):
    """T softmax((L[e-1] / L[e-2]) / temperature) over the balanced tasks; 1 each in the first two intervals.

    With `accumulate`, the ratios of all intervals so far are summed in the softmax (GRAPE, Fan et al. 2025: the weights
    of the last interval times exp(-rate x rate of improvement)).

    An interval is an epoch (paper) or `interval_steps`. L are means over the applied steps in which the task was
    present. A task with fewer than two means gets the mean of the other ratios.

    Raises:
        RefusedError: the interval is one epoch, and its length is not known.
    """

    settings: DwaSettings

    def __init__(self, settings: DwaSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self.interval_steps = settings.interval_steps or run.steps_per_epoch
        if self.interval_steps < 1:
            raise RefusedError(
                "--balancer.interval_steps is 0 (one epoch), but the number of steps per epoch is not known; "
                "allowed: 1 or more"
            )
        nothing, unseen = self.vector(0.0), self.vector(torch.nan)
        self.means = IntervalMeans(interval=0, sums=nothing, steps=nothing, last=unseen, earlier=unseen)
        self.past_ratios = nothing
        """Sum of the ratios of the intervals before that of `means`."""

    def known_means(self, step: int) -> IntervalMeans:
        """Return the means that are known at a step."""
        return self.means.interval_means(step // self.interval_steps)

    def ratios(self, means: IntervalMeans) -> Tensor:
        """Return L[e-1] / L[e-2], [T]; the mean of the known ratios for other tasks, 1 if none is known."""
        known = self.balanced & ~means.earlier.isnan()
        ratios = torch.where(known, self.remaining_losses(means.last) / self.remaining_losses(means.earlier), 0.0)
        mean = torch.where(known.any(), ratios.sum() / known.sum().clamp(min=1), 1.0)
        return torch.where(known, ratios, mean)

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        means = self.known_means(ctx.step)
        ratios = self.ratios(means) + (self.sum_past(means) if self.settings.accumulate else 0.0)
        scores = torch.where(self.balanced, ratios / self.settings.temperature, -torch.inf)
        return self.scale_total(len(self.objective.balanced) * torch.softmax(scores, dim=0), ctx.counts)

    def sum_past(self, means: IntervalMeans) -> Tensor:
        """Return the sum of the ratios of the intervals before that of `means`, [T]."""
        return self.past_ratios if means is self.means else self.past_ratios + self.ratios(self.means)

    def after_step(self, ctx: StepContext) -> None:
        super().after_step(ctx)
        means = self.known_means(ctx.step)
        if self.settings.accumulate:
            self.past_ratios = self.sum_past(means)
        self.means = replace(
            means,
            sums=ctx.commit(means.sums + ctx.losses, means.sums),
            steps=ctx.commit(means.steps + (ctx.counts > 0), means.steps),
        )

    def metrics(self) -> Mapping[str, Any]:
        """Return the number of the `interval` from 0, `interval_steps`, and the `ratios` of the losses."""
        step = 0 if self._last is None else self._last.step
        return {
            **super().metrics(),
            "interval": step // self.interval_steps,
            "interval_steps": self.interval_steps,
            "ratios": self.by_task(self.ratios(self.known_means(step))),
        }

    def state_dict(self) -> dict[str, Any]:
        vectors = {field.name: getattr(self.means, field.name) for field in fields(self.means)}
        interval = vectors.pop("interval")
        return {
            **super().state_dict(),
            "interval": interval,
            "interval_means": {name: vector.cpu() for name, vector in vectors.items()},
            **({"past_ratios": self.past_ratios.cpu()} if self.settings.accumulate else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        vectors = {name: vector.to(self.device) for name, vector in state["interval_means"].items()}
        self.means = IntervalMeans(interval=int(state["interval"]), **vectors)
        if self.settings.accumulate:
            self.past_ratios = state["past_ratios"].to(self.device)
