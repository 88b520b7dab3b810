"""Smooth Tchebycheff scalarisation: the smoothed maximum of preferred losses (Lin et al.)."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.base import normalise
from trp_scale.methods.balancing.global_losses import GlobalLossBalancer, softmax_weights
from trp_scale.methods.balancing.settings import StchSettings


class Stch(GlobalLossBalancer):
    """Descent of mu log sum_t exp(p_t (f_t - z_t) / mu): w_t ~ p_t softmax(p (f - z) / mu)_t f'(L_t), with sum 1.

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
        tasks = self.objective.tasks
        if unknown := sorted(set(settings.preference) - set(tasks)):
            raise RefusedError(f"balancer.preference names unknown tasks {unknown}; allowed: {list(tasks)}")
        preference = [settings.preference.get(task, 1.0) for task in tasks]
        self.preference = torch.tensor(preference, dtype=torch.float64).to(self.device)  # p [T]

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
