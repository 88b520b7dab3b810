"""What every adversary logs of a step, under `adversary` in metrics.jsonl."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trp_scale.adversary.effect import EffectWatch
from trp_scale.config import AdversaryConfig


def log_line(
    settings: AdversaryConfig, effect: EffectWatch, *, sizes: Tensor, sensitivity: Tensor, **shares: Tensor
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
