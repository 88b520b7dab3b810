"""U-MAE's second moment of the global batch. It makes the loss over pairs a sum over rows (upstreams/mae/u_mae.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, Extra, StepStats
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.upstreams.mae.u_mae import MOMENT, ROWS, UNIFORMITY, UniformPatchReconstruction


class Uniformity(Hook):
    """Adds the moment to every batch of the step. With several micro-batches it takes a pass of the encoder over the
    window, without gradients, which sees what the weighted pass sees; with one the objective finds the moment in the
    weighted pass itself.

    It comes after the hooks that change what the model sees. A pass that one of those takes of its own before a step
    is without this task.

    Args:
        objective: the run's.
    """

    name = "uniformity"

    def __init__(self, objective: UniformPatchReconstruction) -> None:
        self.objective = objective
        self._added: dict[Extra, Tensor] = {}

    def before_step(self, ctx: StepContext) -> None:
        rows = ctx.counts[self.objective.tasks.index(UNIFORMITY)]
        self._added = {ROWS: rows}
        if len(ctx.own_window) > 1:
            with torch.no_grad():
                own = [self.objective.moment(ctx.engine, ctx.batch_of(micro)) for micro in ctx.own_window]
            self._added = {MOMENT: ctx.data_group.sum(torch.stack(own).sum(0)) / rows.clamp(min=1)}

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding(self._added)

    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        self._added = {}
