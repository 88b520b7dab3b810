"""A model of square crops on whole images: its predictions for all windows of an image joined at the label's size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.downstream.classification.model import Pixels


def predict_whole(forward: Callable[..., list[Tensor]], pixels: Pixels, batch: Batch) -> Iterator[Tensor]:
    """Each image's prediction at its stored size, [C, H, W] float32, in the order of the rows.

    The windows of all images go through the model in one pass, so every rank makes as many passes, as sharded engines
    need. Where windows overlap their predictions are averaged.

    Args:
        forward: the model, [B, 3, S, S] -> a list whose first item is [B, C, S, S].
        pixels: bytes into normalised pixels.
        batch: of `WholeBatchBuilder`.
    """
    counts = batch["window_counts"]
    there = torch.arange(batch["windows"].shape[1], device=counts.device) < counts[:, None]  # [R, K]
    outputs = forward(pixels(batch["windows"][there]))[0].float()  # [windows, C, S, S]
    parts = zip(
        torch.split(outputs, counts.tolist()),
        batch["window_corners"].tolist(),
        batch["scaled_sizes"].tolist(),
        batch["sizes"].tolist(),
        strict=True,
    )
    for windows, corners, scaled, size in parts:
        whole = joined(windows, corners, tuple(scaled))
        yield F.interpolate(whole[None], size=tuple(size), mode="bilinear", align_corners=False)[0]


def joined(windows: Tensor, corners: list[list[int]], scaled: tuple[int, int]) -> Tensor:
    """[K, C, S, S] at K corners -> [C, H, W] of the scaled image, the mean where windows overlap."""
    size = windows.shape[-1]
    total = windows.new_zeros(windows.shape[1], *scaled)
    times = windows.new_zeros(scaled)
    for window, (top, left) in zip(windows, corners, strict=False):
        total[:, top : top + size, left : left + size] += window
        times[top : top + size, left : left + size] += 1
    return total / times
