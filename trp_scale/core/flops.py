"""FLOPs of operations, as torch counts them: its table, with what older versions leave out."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

ALIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_efficient_attention_backward",
}
"""Fused attention of a CPU, which torch counts from 2.15 on, and what is counted in the same way on every version."""

for _name, _other in ALIKE.items():
    flop_registry.setdefault(getattr(torch.ops.aten, _name), flop_registry[getattr(torch.ops.aten, _other)])

__all__ = ["FlopCounterMode", "flop_registry"]
