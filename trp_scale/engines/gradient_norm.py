"""The size of this rank's part of a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, 0-dimensional float64 on `device`; 0 where there are no gradients.

    Norms are taken in fp32 at least: in fp16 the norm of a scaled gradient passes 65504, and no step would be applied.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(gradients), 2, wide)
    return torch.stack([norm.double().square() for norm in norms]).sum().to(device)
