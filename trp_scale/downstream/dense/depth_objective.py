"""The reverse Huber loss of each pixel's depth (Laina et al. 2016, eq. 2), as TRP's Table 7 fine-tunes on NYUv2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, Extra, StepStats, TaskLosses
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.downstream.classification.model import Pixels

DEPTH = "depth"

THRESHOLD = 0.2
"""c, as a share of the largest error."""

LARGEST = Extra("largest_error")
"""In `Batch.extras`: [] the largest error of the global batch."""


@dataclass(frozen=True, kw_only=True)
class DepthSpace:
    """How what the head gives becomes depth.

    Attributes:
        inverse: targets are 1 / depth.
        mean, deviation: target = mean + deviation x output.
        low, high: depth that may be predicted; high is infinite without a limit.
    """

    inverse: bool
    mean: float
    deviation: float
    low: float
    high: float

    def target(self, depth: Tensor) -> Tensor:
        """Depth of any shape, 0 where it is unknown -> what is learned; 0 stays 0."""
        return torch.where(depth > 0, 1 / depth.clamp(min=1e-12), 0.0) if self.inverse else depth

    def depth(self, target: Tensor) -> Tensor:
        """Back, within the limits."""
        depth = 1 / target.clamp(min=1e-12) if self.inverse else target
        return depth.clamp(self.low, self.high)


class Depth:
    """The mean over all measured pixels of the reverse Huber loss of the standardised target.

    Its threshold c is a fifth of the largest error of the image; an image is never split. Laina et al. and MultiMAE's
    code take the largest of the batch. With dense.threshold batch that is the global batch's, which `LargestError`
    finds beforehand: the largest of a micro-batch or of a rank would be another loss for every split of the same batch.

    Args:
        space: targets.
        threshold: image or batch.
    """

    tasks: tuple[str, ...] = (DEPTH,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = (0,)

    def __init__(self, space: DepthSpace, threshold: Literal["image", "batch"] = "image") -> None:
        self._space, self._per_image = space, threshold == "image"
        self.pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, measured pixels."""
        return (batch["depth"] > 0).sum().double().reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., list[Tensor]], batch: Batch) -> TaskLosses:
        """Sums over measured pixels; rows that are not there have none."""
        errors = self.errors(forward, batch)
        largest = None if self._per_image else batch.extras.get(LARGEST, errors.detach().abs().max())
        total = reverse_huber(errors, largest).sum(dtype=torch.float64)
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))

    def errors(self, forward: Callable[..., list[Tensor]], batch: Batch) -> Tensor:
        """[R, S, S] fp32 in standardised units; 0 where nothing was measured."""
        depth = batch["depth"]  # [R, S, S]
        outputs = forward(self.pixels(batch["images"]))[0].squeeze(1).float()  # [R, S, S]
        target = (self._space.target(depth) - self._space.mean) / self._space.deviation
        return torch.where(depth > 0, outputs - target, 0.0)


def reverse_huber(errors: Tensor, largest: Tensor | None = None) -> Tensor:
    """|e| where it is at most c, else (e^2 + c^2) / 2 c; c = a fifth of the largest |e|, taken as a constant.

    Args:
        errors: [R, ...]; 0 where there is none.
        largest: [] the largest |e|; None = each image's own.
    """
    size = errors.abs()
    if largest is None:
        largest = size.detach().flatten(1).amax(1).view(-1, *[1] * (errors.ndim - 1))  # [R, 1, 1]
    threshold = (THRESHOLD * largest).clamp(min=torch.finfo(errors.dtype).tiny)
    return torch.where(size <= threshold, size, (errors.square() + threshold.square()) / (2 * threshold))


class LargestError(Hook):
    """Adds the largest error of the global batch to each of its micro-batches: a pass over the window beforehand,
    without gradients, which sees what the weighted pass sees. Where one rank holds the whole batch in one micro-batch
    the objective finds it there itself.

    Args:
        objective: the run's.
    """

    name = "largest_error"

    def __init__(self, objective: Depth) -> None:
        self.objective = objective
        self._added: dict[Extra, Tensor] = {}

    @torch.no_grad()
    def before_step(self, ctx: StepContext) -> None:
        self._added = {}
        if len(ctx.window) > 1 or ctx.data_group.size > 1:
            errors = [self.objective.errors(ctx.engine, ctx.reseeded(micro)).abs().max() for micro in ctx.window]
            self._added = {LARGEST: ctx.data_group.max(torch.stack(errors).max())}

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding(self._added)

    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        self._added = {}
