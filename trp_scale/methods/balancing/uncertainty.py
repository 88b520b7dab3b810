"""Uncertainty weights: a learned variance per task (Kendall et al.; by default in the form of MultiMAE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.base import LossReadingBalancer, TaskAdam
from trp_scale.methods.balancing.settings import UncertaintySettings


class Uncertainty(LossReadingBalancer):
    """Minimises sum_t c_t exp(-s_t) L_t + b s_t over the model's weights and s. s starts at 0.

    multimae: c = b = 1. kendall, with s = log sigma^2: b = 1/2, and c = 1/2 for regression, 1 for classification.
    The gradient of s on the global batch is b - c exp(-s) L in closed form, so it does not depend on the split of the
    batch. An absent task keeps its s. The weights c exp(-s) have no fixed sum, so there is no `total`.
    """

    settings: UncertaintySettings

    def __init__(self, settings: UncertaintySettings, run: RunContext) -> None:
        super().__init__(settings, run)
        kendall = settings.form == "kendall"
        self.slope = 0.5 if kendall else 1.0  # b
        distances, tasks = self.objective.regression, self.objective.tasks
        factors = [0.5 if kendall and position in distances else 1.0 for position in range(len(tasks))]
        self.factors = torch.tensor(factors, dtype=torch.float64).to(self.device)  # c [T]
        self.log_variances = self.vector(0.0)
        self.adam = TaskAdam(self.log_variances, settings.lr)

    def task_weights(self) -> Tensor:
        """Return c exp(-s), [T]."""
        return self.factors * torch.exp(-self.log_variances)

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        return torch.where(self.present(ctx.counts), self.task_weights(), 0.0)

    def after_step(self, ctx: StepContext) -> None:
        assert ctx.applied is not None, "decided before the hooks' after_step"
        gradient = self.slope - self.task_weights() * self.remaining_losses(ctx.losses)
        self.log_variances = self.adam.step(self.log_variances, gradient, self.present(ctx.counts) & ctx.applied)
        super().after_step(ctx)

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics, `log_variances` (s after this step) and `regulariser` (sum of b s, not in the loss)."""
        logs = torch.where(self.balanced, self.log_variances, 0.0)
        return {
            **super().metrics(),
            "log_variances": self.by_task(logs),
            "regulariser": float(self.slope * logs.sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "log_variances": self.log_variances.cpu(),
            "adam": self.adam.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.log_variances = state["log_variances"].to(self.device)
        self.adam.load_state_dict(state["adam"])
