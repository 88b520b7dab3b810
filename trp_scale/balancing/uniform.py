"""Equal weights (TRP eq. 4)."""

from __future__ import annotations

from torch import Tensor

from trp_scale.balancing.base import TaskBalancer
from trp_scale.balancing.settings import UniformSettings
from trp_scale.core.hooks import StepContext


class Uniform(TaskBalancer):
    """The same weight for every balanced task: with `total: 1` they sum to 1 over the tasks present in the global
    batch; with `paper` each has 1/T, or 1 with `form: sum`, whoever is absent."""

    settings: UniformSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        divided = self.settings.total == "paper" and self.settings.form == "mean"
        each = self.balanced.double()
        return self.totalled(each / each.sum().clamp(min=1) if divided else each, ctx.counts)
