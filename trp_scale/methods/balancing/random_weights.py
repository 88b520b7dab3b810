"""Random loss weighting: new weights in every step (Lin et al. 2022, RLW)."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.core.seeds import tensor_seed
from trp_scale.methods.balancing.base import TaskBalancer
from trp_scale.methods.balancing.settings import RandomSettings


class RandomWeights(TaskBalancer):
    """softmax(z / temperature) over the present tasks, z standard normal: drawn from (seed, step) on the host, so that
    all ranks, engines and resumed runs have the same."""

    settings: RandomSettings

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(tensor_seed(self.run.seed, f"random weights/{ctx.step}"))
        draws = torch.randn(len(self.objective.tasks), generator=generator, dtype=torch.float64)  # [T]
        present = self.present(ctx.counts)
        scores = torch.where(present, draws.to(self.device, non_blocking=True) / self.settings.temperature, -torch.inf)
        return torch.where(present, torch.softmax(scores, dim=0), 0.0)  # no task: softmax of all -inf is NaN
