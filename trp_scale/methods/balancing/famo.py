"""FAMO: weights under which all losses fall at the same rate (Liu et al., Algorithm 1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.balancing.base import TaskAdam, normalise
from trp_scale.methods.balancing.global_losses import GlobalLossBalancer, softmax_weights
from trp_scale.methods.balancing.settings import FamoSettings


class Famo(GlobalLossBalancer):
    """w_t = (z_t / L_t) / sum_s (z_s / L_s) with z = softmax(xi); the descent of sum_t z_t log L_t. xi starts at 0.

    xi moves by Adam along J^T (log L_k - log L_{k+1}) + gamma xi, where J is the Jacobian of the softmax: tasks with
    slowly falling losses gain weight. The authors compute L_{k+1} in a second forward pass on the batch of step k. Here
    it is the loss of the next batch, before its weights are computed, and costs nothing. On a fixed batch both are
    equal; otherwise the difference contains the noise of two batches, which Adam's moments and `loss_ema` average.

    An absent task keeps its xi and gets no weight; its next difference is from its last seen loss. `lagged` weighs the
    batch by xi and losses before it. With `scale: reference`, L is the loss above its reference.
    """

    settings: FamoSettings

    steadier = "--balancer.min_count, --balancer.loss_ema or a smaller --balancer.lr"

    def __init__(self, settings: FamoSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self.logits = self.vector(0.0)  # xi
        self.adam = TaskAdam(self.logits, settings.lr)

    def descend(self, adam: TaskAdam, losses: Tensor, moving: Tensor) -> Tensor:
        """Return xi [T] after a step of Adam, which changes the state of `adam`.

        Args:
            losses: smoothed losses after the last update, [T].
            moving: [T] bool; tasks seen for the first time do not move.
        """
        moving = moving & ~self.last_losses.isnan()
        fall = torch.where(moving, self.excess(self.last_losses).log() - self.excess(losses).log(), 0.0)
        shares = softmax_weights(self.logits, 1.0, moving)  # z
        gradient = shares * (fall - (shares * fall).sum()) + self.settings.gamma * self.logits
        return adam.step(self.logits, gradient, moving)

    @staticmethod
    def weigh(logits: Tensor, excess: Tensor, eligible: Tensor) -> Tensor:
        """Return (z_t / L_t) / sum_s (z_s / L_s), [T]."""
        return normalise(softmax_weights(logits, 1.0, eligible) / excess)

    def task_weights(self, ctx: StepContext, losses: Tensor, counts: Tensor, eligible: Tensor) -> Tensor:
        logits = self.descend(copy.copy(self.adam), losses, eligible)
        return self.weigh(logits, self.excess(losses), eligible)

    def lagged_weights(self, ctx: StepContext, eligible: Tensor) -> Tensor:
        return self.weigh(self.logits, self.excess(self.fill_unseen(self.last_losses)), eligible)

    def after_step(self, ctx: StepContext) -> None:
        assert ctx.applied is not None, "decided before the hooks' after_step"
        moving = self.eligible(ctx.counts) & ctx.applied
        self.logits = self.descend(self.adam, self.smooth(ctx.losses), moving)
        super().after_step(ctx)  # last, because the losses above are smoothed with the earlier state

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics and `logits` (xi after this step)."""
        return {**super().metrics(), "logits": self.by_task(self.logits)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "logits": self.logits.cpu(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.logits = state["logits"].to(self.device)
        self.adam.load_state_dict(state["adam"])
