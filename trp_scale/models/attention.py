"""Softmax attention of all encoders but BERT's, whose dropout draws inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax attention [B, H, Q, D / H] with a bias [B, H, Q, T] on its scaled scores.

    On a CPU it is computed in fp32 or fp64: torch's fused kernel is 1.6 to 2.5 times slower in bf16, and rounds more.
    """
    if queries.device.type != "cpu" or queries.dtype not in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
    with torch.autocast("cpu", enabled=False):
        widened = None if bias is None else bias.float()
        context = F.scaled_dot_product_attention(queries.float(), keys.float(), values.float(), attn_mask=widened)
    return context.to(queries.dtype)
