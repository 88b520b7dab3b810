"""Balancers that read losses: the units that they read them in. Eq. 7 of TRP compares pixels with nats as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.balancing.base import TaskBalancer
from trp_scale.balancing.settings import LossReadingSettings
from trp_scale.config import RefusedError
from trp_scale.core.batch import StepStats
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext

SMALLEST_EXCESS = 1e-3
"""Least that is left of a loss above its reference, for methods that divide by it or take its logarithm."""
SMALLEST_LOSS = 1e-12
"""The same for losses that no reference is subtracted from: only a loss of exactly 0 is kept from being divided by."""


class LossReadingBalancer(TaskBalancer):
    """Reads losses as they are, over their first value, or minus a reference (`balancer.scale`).

    The total is of the losses as they are; `scale` decides what the weights are made of.
    """

    settings: LossReadingSettings

    def __init__(self, settings: LossReadingSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        tasks = self.objective.tasks
        if unknown := sorted(set(settings.reference) - set(tasks)):
            raise RefusedError(f"balancer.reference names {unknown}; the tasks are {list(tasks)}")
        reference = [settings.reference.get(task, 0.0) for task in tasks]
        self.reference = torch.tensor(reference, dtype=torch.float64).to(self.device)
        # NaN marks a task that was never seen.
        self.first_losses = self.vector(torch.nan)

    def vector(self, value: float) -> Tensor:
        """[T] float64 of one value."""
        return torch.full((len(self.objective.tasks),), value, dtype=torch.float64, device=self.device)

    def scaled(self, losses: Tensor) -> Tensor:
        """[T] losses as the balancer reads them."""
        if self.settings.scale == "initial":
            first = torch.where(self.first_losses.isnan(), losses, self.first_losses)
            return losses / first.clamp(min=SMALLEST_LOSS)  # segmentation into a single class begins at 0
        return losses - self.reference if self.settings.scale == "reference" else losses

    def left(self, losses: Tensor) -> Tensor:
        """[T] the same, kept above 0: a loss at its reference or below counts as SMALLEST_EXCESS above it."""
        smallest = SMALLEST_EXCESS if self.settings.scale == "reference" else SMALLEST_LOSS
        return self.scaled(losses).clamp(min=smallest)

    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        if not stats.applied or ctx.sums is None:
            return
        first = self.first_losses.isnan() & (ctx.counts > 0)
        self.first_losses = torch.where(first, ctx.means(ctx.sums), self.first_losses)

    def losses_read(self) -> Tensor | None:
        """[T] losses that the last weights or state were made of, NaN where there are none; None before any step."""
        if self._last is None or self._last.sums is None:
            return None
        return torch.where(self._last.counts > 0, self._last.means(self._last.sums), torch.nan)

    def metrics(self) -> Mapping[str, Any]:
        """Those of all balancers, and scaled: the losses as they are read, where that is not as they are."""
        values = dict(super().metrics())
        losses = self.losses_read()
        if self.settings.scale != "none" and losses is not None:
            values["scaled"] = self.by_task(self.scaled(losses))
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"first_losses": self.first_losses.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_losses = state["first_losses"].to(self.device)
