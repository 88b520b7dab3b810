"""What every adversary logs of a step, under `adversary` in metrics.jsonl; and a warning where it does nothing."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from trp_scale.adversary.settings import AdversarySettings
from trp_scale.core.hooks import StepContext

logger = logging.getLogger(__name__)

IDLE_STEPS = 100
"""Steps in a row without effect after which a warning is due."""
NEGLIGIBLE = 1e-6
"""Share of the loss: an adversary that cannot change it by more, to first order, has no effect in fp32. Measured on a
small MAE+ with eps 20: 5e-8 for the shared relative embedding, which is inert, and 0.8 to 20 for the others. Under bf16
rounding gives the inert one 1e-3, so that only its settings tell (settings.py)."""


class EffectWatch:
    """Counts the steps in a row without effect, on the device; they are read with the metrics.

    Args:
        device: where the counter lives.
    """

    def __init__(self, device: torch.device) -> None:
        self.idle = torch.zeros((), dtype=torch.int64, device=device)
        self._warned = False

    def note(self, ctx: StepContext, effective: Tensor) -> None:
        """Take note of a step, where it was applied. effective: 0-dimensional bool, on the device."""
        self.idle = ctx.commit(torch.where(effective, 0, self.idle + 1), self.idle)

    def warn(self, idle: int, kind: str) -> None:
        """Say so once when the count, as read from the device, is too high; again after it has been back at work."""
        if idle < IDLE_STEPS:
            self._warned = False
        elif not self._warned:
            self._warned = True
            logger.warning(
                "the adversary %s had no effect for %d steps in a row: its gradient is zero, not finite or too small "
                "for its ball to change the loss, or its steps are too small to move it; look at sensitivity, norm "
                "and saturated in metrics.jsonl, and at --adversary.lr, --adversary.eps and --adversary.on_saturation",
                kind,
                idle,
            )


def log_line(
    settings: AdversarySettings, effect: EffectWatch, *, sizes: Tensor, sensitivity: Tensor, **shares: Tensor
) -> dict[str, Any]:
    """The values, in one read of the device; warns when a warning of no effect is due.

    Args:
        sizes: norm of each ball's perturbation.
        sensitivity: 0-dimensional |dL/da|.
        shares: further 0-dimensional values, by the name they are logged under.
    Returns:
        kind; norm and largest_norm: mean and largest of the sizes; eps; share_of_eps: the mean over eps; sensitivity;
        the shares.
    """
    values = [sizes.mean(), sizes.max(), sensitivity, effect.idle, *shares.values()]
    mean, largest, slope, idle, *rest = torch.stack([value.double() for value in values]).tolist()  # the one read
    effect.warn(int(idle), settings.kind)
    return {
        "kind": settings.kind,
        "norm": mean,
        "largest_norm": largest,
        "eps": settings.eps,
        "share_of_eps": mean / settings.eps,
        "sensitivity": slope,
        **dict(zip(shares, rest, strict=True)),
    }
