"""The reverse Huber loss of each pixel's depth (Laina et al. 2016, eq. 2), as TRP's Table 7 fine-tunes on NYUv2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.downstream.classification.objective import Pixels

DEPTH = "depth"

THRESHOLD = 0.2
"""c, as a share of the largest error."""


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

    Its threshold c is a fifth of the largest error *of the image*. The paper takes the largest of the batch; over
    micro-batches and ranks that would be another number for every split of the same global batch, and with it another
    loss. An image is never split.

    Args:
        space: targets.
    """

    tasks: tuple[str, ...] = (DEPTH,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = (0,)

    def __init__(self, space: DepthSpace) -> None:
        self._space = space
        self.pixels = Pixels()

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, measured pixels."""
        return (batch["depth"] > 0).sum().double().reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., list[Tensor]], batch: Batch) -> TaskLosses:
        """Sums over measured pixels; rows that are not there have none."""
        depth = batch["depth"]  # [R, S, S]
        outputs = forward(self.pixels(batch["images"]))[0].squeeze(1).float()  # [R, S, S]
        target = (self._space.target(depth) - self._space.mean) / self._space.deviation
        errors = torch.where(depth > 0, outputs - target, 0.0)
        total = reverse_huber(errors).sum(dtype=torch.float64)
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))


def reverse_huber(errors: Tensor) -> Tensor:
    """|e| where it is at most c, else (e^2 + c^2) / 2 c; c = a fifth of the image's largest |e|, taken as a constant.

    Args:
        errors: [R, ...]; 0 where there is none.
    """
    size = errors.abs()
    threshold = THRESHOLD * size.detach().flatten(1).amax(1).view(-1, *[1] * (errors.ndim - 1))  # [R, 1, 1]
    threshold = threshold.clamp(min=torch.finfo(errors.dtype).tiny)
    return torch.where(size <= threshold, size, (errors.square() + threshold.square()) / (2 * threshold))
