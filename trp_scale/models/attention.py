"""Softmax attention of all encoders but BERT's, whose dropout draws inside; and attention inside packed segments."""

from __future__ import annotations

import math
from inspect import signature
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

HAS_WINDOWS = "window_size" in signature(varlen_attn).parameters
"""Whether this version of torch has attention inside segments with a window."""


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


def attention_shares(queries: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(Q K^T / sqrt(D / H) + bias) [B, H, Q, T] in fp32 or fp64, which `attend` never stores. Autocast
    rounds the products."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = (queries.to(dtype) @ keys.to(dtype).transpose(-1, -2)).to(dtype) * queries.shape[-1] ** -0.5
    return torch.softmax(scores if bias is None else scores + bias.to(dtype), dim=-1)


def cut_windows(part: Tensor, window: int) -> Tensor:
    """Cut a square grid of patches into windows, [B, H, 1 + G^2, C] -> [B n, H, 1 + w^2, C].

    The windows of an image come row by row. Each begins with a copy of the class token. Those at right and bottom are
    padded with zeros if w does not divide G.

    Args:
        window: w, patches along each side.
    """
    batch, heads, tokens, channels = part.shape
    grid = math.isqrt(tokens - 1)
    count = math.ceil(grid / window)
    patches = part[:, :, 1:].reshape(batch, heads, grid, grid, channels)
    patches = F.pad(patches, (0, 0, 0, count * window - grid, 0, count * window - grid))
    patches = patches.view(batch, heads, count, window, count, window, channels)
    patches = patches.permute(0, 2, 4, 1, 3, 5, 6).reshape(batch * count**2, heads, window**2, channels)
    return torch.cat([part[:, :, :1].repeat_interleave(count**2, dim=0), patches], dim=2)


def join_windows(part: Tensor, batch: int, grid: int) -> Tensor:
    """Invert `cut_windows`, [B n, H, 1 + w^2, C] -> [B, H, 1 + G^2, C]. The class token is the mean of its copies."""
    windows, heads, tokens, channels = part.shape
    count, window = math.isqrt(windows // batch), math.isqrt(tokens - 1)
    copies = part[:, :, :1].reshape(batch, count**2, heads, 1, channels)
    patches = part[:, :, 1:].reshape(batch, count, count, heads, window, window, channels)
    patches = patches.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)  # [B, H, G or more, G or more, C]
    return torch.cat([copies.mean(1), patches[:, :, :grid, :grid].flatten(2, 3)], dim=2)


def window_padding(grid: int, window: int, like: Tensor) -> Tensor:
    """Return the bias of the keys in the windows of an image, [n, 1, 1, 1 + w^2]: -inf for padding, else 0, with the
    type and device of `like`."""
    return cut_windows(like.new_ones(1, 1, 1 + grid**2, 1), window).log().transpose(2, 3)


class PackedSegments(NamedTuple):
    """Segments of packed rows; positions attend to those of their own segment. The padding at the end of a row is one.

    Attributes:
        starts: [R, L] int64, first position of the segment of each position.
        bounds: [N + 1] int32, ends of the segments of all rows in the flattened rows, after a 0; N is the same for all
            batches, because empty segments fill up.
    """

    starts: Tensor
    bounds: Tensor

    @classmethod
    def from_ends(cls, ends: Tensor, length: int) -> PackedSegments:
        """Return the segments of rows of a length L.

        Args:
            ends: [R, S] int64, ends of the segments of each row, ascending, padded with the last one.
        """
        rows = len(ends)
        ends = F.pad(ends, (0, 1), value=length)  # [R, S + 1]
        positions = torch.arange(length, device=ends.device).expand(rows, length).contiguous()
        numbers = torch.searchsorted(ends, positions, right=True)  # [R, L]
        first = torch.arange(rows, device=ends.device)[:, None] * length
        return cls(F.pad(ends, (1, 0)).gather(1, numbers), F.pad((first + ends).flatten(), (1, 0)).to(torch.int32))

    def positions(self) -> Tensor:
        """Return the positions inside the segments, [R, L]."""
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts

    def mask(self, queries: Tensor | None = None) -> Tensor:
        """Return the mask [R, 1, Q, L] of queries at positions [R, Q] of the rows; `None` = all."""
        starts = self.starts if queries is None else self.starts.gather(1, queries)
        return (starts[:, :, None] == self.starts[:, None, :])[:, None]


def has_segment_kernel(hidden: Tensor) -> bool:
    """Whether `attend_segments` has a kernel for attention over hidden states of this device and type."""
    if not (HAS_WINDOWS and hidden.is_cuda):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
    return dtype in (torch.bfloat16, torch.float16)


def attend_segments(queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, reach: int) -> Tensor:
    """Return softmax attention inside segments, [R, H, L, D / H], to keys at most `reach` positions away; -1 = all.

    Args:
        queries, keys, values: [R, H, L, D / H] in bf16 or fp16 on a GPU.
        bounds: as in `PackedSegments`.
    """
    rows, _, length, _ = queries.shape
    queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (queries, keys, values))
    context = varlen_attn(queries, keys, values, bounds, bounds, length, length, window_size=(reach, reach))
    assert isinstance(context, Tensor)  # [R * L, H, D / H]
    return context.unflatten(0, (rows, length)).transpose(1, 2)  # type: ignore[no-any-return, no-untyped-call]
