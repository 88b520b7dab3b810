"""Equal weights (TRP eq. 4)."""

from __future__ import annotations

from torch import Tensor

from trp_scale.hooks.balancing.base import TaskBalancer, normalised
from trp_scale.hooks.base import StepContext


class Uniform(TaskBalancer):
    """1/T for every balanced task; with `total: 1` over those present in the global batch, so that they sum to 1."""

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        present = (self.balanced & (ctx.counts > 0)).double()
        if self.config.total == "paper":
            return present / self.balanced.sum().clamp(min=1)
        return normalised(present)
