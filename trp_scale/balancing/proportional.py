"""Weights by number of elements: the mean over all elements, plain BERT's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.balancing.base import TaskBalancer, normalised
from trp_scale.core.hooks import StepContext


class Proportional(TaskBalancer):
    """w_t = n_t / sum of n over the balanced tasks."""

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        return normalised(torch.where(self.balanced, ctx.counts, 0.0))
