"""Group DRO: the tasks' shares climb by exponentiated gradient ascent (Sagawa et al., Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.global_losses import GlobalLossBalancer
from trp_scale.methods.balancing.minimax import softmax_weights
from trp_scale.methods.balancing.settings import GroupDroSettings


class GroupDro(GlobalLossBalancer):
    """q_t <- q_t exp(rate (L_t + C / sqrt(n_t))), normalised; then the batch is weighed by q.

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
