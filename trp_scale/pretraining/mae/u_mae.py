"""U-MAE: reconstruction, and class tokens that spread over the sphere (Zhang et al. 2022, How Mask Matters)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.distributed.groups import Group
from trp_scale.pretraining.mae.objective import RECONSTRUCTION, MaskedPatchReconstruction
from trp_scale.pretraining.mae.settings import MaeObjectiveConfig

UNIFORMITY = "uniformity"
MOMENT = Extra("uniformity_moment")
ROWS = Extra("uniformity_rows")
"""Extras of a batch: S of the global batch; or the rows of a global batch that is one micro-batch on each rank."""


class UniformPatchReconstruction(MaskedPatchReconstruction):
    """A second task outside the balance: the mean over all pairs (i, j) of the global batch, i = j too, of the squared
    cosine (f_i . f_j)^2, f_i the class token of the encoder's output in the masked pass.

    That mean is ||S||_F^2 with the second moment S = 1/B sum_i f_i f_i^T, [D, D]. With S known and held, row i counts
    f_i^T S f_i, an element of the task, and has the gradient of 2 f_i^T S f_i: both add up to the mean over pairs and
    its gradient, however the global batch is split. `Uniformity` puts S under `batch.extras`; where
    the global batch is one micro-batch on each rank, S comes from this very pass. Without either (held-out rows, whose
    pairs would be those of a micro-batch) the task is absent.

    Args:
        config: settings.
        patch_size: side of a patch in pixels.
        data_group: ranks that split the global batch.
    """

    tasks = (RECONSTRUCTION, UNIFORMITY)
    in_a_graph = False  # its moment is a sum over ranks

    def __init__(self, config: MaeObjectiveConfig, patch_size: int, data_group: Group) -> None:
        super().__init__(config, patch_size)
        self.weight = config.uniformity
        self.data_group = data_group

    def count(self, batch: Batch) -> Tensor:
        """[2] float64, masked patches and crops of the rows that are there."""
        return torch.cat([super().count(batch), self.present(batch).sum().reshape(1)])

    def outside_weights(self, counts: Tensor) -> Tensor:
        """objective.uniformity for the second task."""
        weights = torch.zeros_like(counts)
        weights[self.tasks.index(UNIFORMITY)].fill_(self.weight)
        return weights

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Both tasks' sums, in float64."""
        if MOMENT not in batch.extras and ROWS not in batch.extras:
            return super().__call__(forward, batch)
        clean = self.patches(batch)  # [B, N, P], B = R k
        output = self.run(forward, batch, clean, give="prediction_and_class")
        reconstruction = self.losses(self.compute_errors(output.prediction, batch, clean), batch)
        uniformity = self.spread(output.class_token, batch).reshape(1)
        return TaskLosses(sums=torch.cat([reconstruction.sums[:1], uniformity]), counts=self.count(batch))

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """The reconstruction's sums for given errors [R, k, M]; linear in them. The other task is absent."""
        losses = super().losses(errors, batch)
        absent = losses.counts.new_zeros(1)
        return TaskLosses(sums=torch.cat([losses.sums, absent]), counts=torch.cat([losses.counts[:1], absent]))

    def spread(self, class_token: Tensor, batch: Batch) -> Tensor:
        """0-dimensional, sum of f_i^T S f_i over the rows of class tokens [B, D], with the gradient of twice that."""
        features = F.normalize(class_token.double(), dim=-1)
        moment = batch.extras.get(MOMENT)
        if moment is None:
            total = self.data_group.sum(self.compute_moment(features, batch))
            moment = total / batch.extras[ROWS].clamp(min=1)
        rows = ((features @ moment) * features).sum(-1)  # [B]
        return (2.0 * rows - rows.detach()) @ self.present(batch)

    def moment(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """[D, D] sum of f_i f_i^T over this micro-batch, from a pass through the encoder alone."""
        class_token: Tensor = self.run(forward, batch, self.patches(batch), give="class_token")
        return self.compute_moment(F.normalize(class_token.double(), dim=-1), batch)

    def compute_moment(self, features: Tensor, batch: Batch) -> Tensor:
        """[B, D] -> [D, D], without a graph; rows that are not there are left out."""
        features = features.detach()
        return (features * self.present(batch).unsqueeze(1)).T @ features

    def present(self, batch: Batch) -> Tensor:
        """[B] float64: each crop's row weight."""
        return batch["row_weights"].double().repeat_interleave(batch["masked"].shape[1])


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
                moments = [self.objective.moment(ctx.engine, ctx.apply_hooks(micro)) for micro in ctx.own_window]
            self._added = {MOMENT: ctx.data_group.sum(torch.stack(moments).sum(0)) / rows.clamp(min=1)}

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding(self._added)

    def after_step(self, ctx: StepContext) -> None:
        self._added = {}
