"""Metrics of an adversary, under `adversary` in metrics.jsonl; and a warning where it does nothing."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.adversary.settings import AdversarySettings

logger = logging.getLogger(__name__)

IDLE_STEPS = 100
"""Steps in a row without effect after which a warning is due."""
NEGLIGIBLE = 1e-6
"""Share of the loss: an adversary that cannot change it by more, to first order, has no effect in fp32. Measured on a
small MAE+ with eps 20: 5e-8 for the shared relative embedding, which is inert, and 0.8 to 20 for the others. Under bf16
rounding gives the inert one 1e-3, so that only its settings tell (settings.py)."""


QUARTER = 4
"""An adversary that has hardly acted for this part of the run is warned of, while the run can still be begun again."""
SMALL_SHARE = 0.05
SMALL_EFFECT = 0.002
"""Share of eps, and of the loss, below which an adversary hardly acts. Measured on adpe_tiny: absolute coordinates at
the weights' learning rate end at 0.03 and stay below 0.0012; those that act get to 0.2 to 1, and 0.006 to 0.1
(docs/experiments.md)."""


class EffectWatch:
    """Counts the steps in a row without effect, on the device; they are read with the metrics. Beside them it looks at
    the logged values: whether the adversary hardly acts, for a quarter of the run and at least IDLE_STEPS.

    The latter is found on the rank that logs. A run that goes on looks anew, from there.

    Args:
        run: on whose device the counter lives, and whose steps are watched.
    """

    def __init__(self, run: RunContext) -> None:
        self.idle = torch.zeros((), dtype=torch.int64, device=run.device)
        self.patience = max(IDLE_STEPS, run.config.training.steps // QUARTER)
        self.steps = 0
        self._still_since: int | None = None
        self._warned = ""

    def note(self, ctx: StepContext, effective: Tensor) -> None:
        """Take note of a step, where it was applied. effective: 0-dimensional bool, on the device."""
        self.idle = ctx.commit(torch.where(effective, 0, self.idle + 1), self.idle)
        self.steps = ctx.step + 1

    def notice(self, settings: AdversarySettings, idle: int, share_of_eps: float, effect: float | None) -> str:
        """Describe an adversary with little or no effect; "" if it acts. It is logged as a warning once, and again
        after the adversary has been back at work.

        Args:
            idle, share_of_eps, effect: as read from the device and logged.
        """
        still = effect is not None and share_of_eps < SMALL_SHARE and abs(effect) < SMALL_EFFECT
        self._still_since = (self._still_since or self.steps) if still else None
        words, kind = "", settings.kind
        if idle >= IDLE_STEPS:
            words = "idle"
            notice = (
                f"the adversary {kind} had no effect for {idle} steps in a row: its gradient is zero, not finite or "
                "too small for its ball to change the loss, or its steps are too small to move it; look at "
                "sensitivity, norm and saturated in metrics.jsonl, and at --adversary.lr, --adversary.eps and "
                "--adversary.on_saturation"
            )
        elif self._still_since is not None and self.steps - self._still_since >= self.patience:
            words = "still"
            notice = (
                f"the adversary {kind} hardly acts, since step {self._still_since}: it stands at {share_of_eps:.2g} of "
                f"eps, and makes {abs(effect or 0.0):.1g} of the loss; {_remedy(settings)}"
            )
        if words and words != self._warned:
            logger.warning("%s", notice)
        self._warned = words
        return notice if words else ""


def _remedy(settings: AdversarySettings) -> str:
    """Name the setting that makes it act."""
    lr, ascent = getattr(settings, "lr", 0.0), getattr(settings, "ascent", "")
    if ascent == "adamw" and lr == 0.0:
        return (
            "AdamW moves it by the weights' learning rate a step at most: give it its own, --adversary.lr (in the "
            "units of eps), or a smaller --adversary.eps"
        )
    return f"try a larger --adversary.lr than {lr:g}, or a smaller --adversary.eps than {settings.eps:g}"


def log_line(
    settings: AdversarySettings, watch: EffectWatch, *, sizes: Tensor, sensitivity: Tensor, **shares: Tensor
) -> dict[str, Any]:
    """The values, in one read of the device; warns when a warning of no effect is due.

    Args:
        sizes: norm of each ball's perturbation.
        sensitivity: 0-dimensional |dL/da|.
        shares: further 0-dimensional values, by the name they are logged under.
    Returns:
        kind; norm and largest_norm: mean and largest of the sizes; eps; share_of_eps: the mean over eps; sensitivity;
        the shares; and, while it does nothing or hardly anything, the notice of it.
    """
    values = [sizes.mean(), sizes.max(), sensitivity, watch.idle, *shares.values()]
    mean, largest, slope, idle, *rest = torch.stack([value.double() for value in values]).tolist()  # the one read
    measured = dict(zip(shares, rest, strict=True))
    notice = watch.notice(settings, int(idle), mean / settings.eps, measured.get("effect"))
    return {
        "kind": settings.kind,
        "norm": mean,
        "largest_norm": largest,
        "eps": settings.eps,
        "share_of_eps": mean / settings.eps,
        "sensitivity": slope,
        **measured,
        **({"notice": notice} if notice else {}),
    }
