"""Weights that follow from the counts alone: equal (TRP eq. 4), or by number of elements (plain BERT's loss)."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.methods.balancing.base import TaskBalancer, normalise
from trp_scale.methods.balancing.settings import UniformSettings


class Uniform(TaskBalancer):
    """Equal weight for every balanced task: with `total: 1` they sum to 1 over the tasks present in the global
    batch; with `paper` each has 1/T, or 1 with `form: sum`, whoever is absent."""

    settings: UniformSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        divided = self.settings.total == "paper" and self.settings.form == "mean"
        counted = self.balanced.double()
        return self.scale_total(counted / counted.sum().clamp(min=1) if divided else counted, ctx.counts)


class Proportional(TaskBalancer):
    """w_t = n_t / sum of n over the balanced tasks: the mean over all elements."""

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        return normalise(torch.where(self.balanced, ctx.counts, 0.0))
