"""From a model's output to the numbers that are stored, on the model's device and without waiting for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trp_scale.data.images.members import NOT_MEASURED, VOID

LARGEST = 65535
"""The largest number of 16 bits."""

Size = tuple[int, int]
"""(H, W) of an image."""

Interpret = Callable[[Any, Sequence[Size]], tuple[list[Tensor], Tensor]]
"""(output of a batch, sizes of its images) -> map of each image, int32 [H, W], and its clipped pixels, int32 [B]."""


def depth_maps(processor: Any, scale: float | None) -> Interpret:
    """How to make maps of a depth estimator's output.

    Args:
        processor: its image processor, whose post_process_depth_estimation is used where it has one.
        scale: metres per stored unit; None: each image's finite output goes to 1..65535.
    """

    def interpret(output: Any, sizes: Sequence[Size]) -> tuple[list[Tensor], Tensor]:
        depths = _estimates(processor, output, sizes)
        if scale is None:
            maps = [relative_units(depth) for depth in depths]
            return maps, torch.zeros(len(maps), dtype=torch.int32, device=maps[0].device)
        pairs = [metric_units(depth, scale) for depth in depths]
        return [units for units, _ in pairs], torch.stack([clipped for _, clipped in pairs])

    return interpret


def _estimates(processor: Any, output: Any, sizes: Sequence[Size]) -> list[Tensor]:
    """Depth of each image at its size, float [H, W]."""
    post_process = getattr(processor, "post_process_depth_estimation", None)
    if post_process is None:
        return [
            functional.interpolate(depth[None, None], size=size, mode="bicubic", align_corners=False)[0, 0]
            for depth, size in zip(output.predicted_depth, sizes, strict=True)
        ]
    arguments: dict[str, Any] = {"target_sizes": list(sizes)}
    if "source_sizes" in inspect.signature(post_process).parameters:  # ZoeDepth takes off the padding that it put on
        arguments["source_sizes"] = list(sizes)
    found = post_process(output, **arguments)
    # Some drop every dimension of 1, that of an image one pixel wide too.
    return [each["predicted_depth"].reshape(size) for each, size in zip(found, sizes, strict=True)]


def relative_units(depth: Tensor) -> Tensor:
    """The finite values from the smallest to the largest as 1 to 65535, int32; others are NOT_MEASURED; equal ones 1.

    Args:
        depth: float [H, W].
    """
    finite = depth.isfinite()
    low = torch.where(finite, depth, torch.inf).amin()
    high = torch.where(finite, depth, -torch.inf).amax()
    share = (depth - low) / (high - low).clamp(min=torch.finfo(depth.dtype).tiny)
    units = 1 + (share * (LARGEST - 1)).round()
    return torch.where(finite, units, NOT_MEASURED).to(torch.int32)


def metric_units(depth: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Metres in units of `scale`, clipped to 1..65535, int32, and how many were clipped, int32; what is not finite is
    NOT_MEASURED.

    Args:
        depth: metres, float [H, W].
        scale: metres per unit.
    """
    finite = depth.isfinite()
    units = (depth / scale).round()
    clipped = finite & ((units < 1) | (units > LARGEST))
    return torch.where(finite, units.clamp(1, LARGEST), NOT_MEASURED).to(torch.int32), clipped.sum(dtype=torch.int32)


def class_maps(processor: Any, classes: int) -> Interpret:
    """How to make maps of a segmentation model's output: what is none of so many classes (such as -1) is VOID."""

    def interpret(output: Any, sizes: Sequence[Size]) -> tuple[list[Tensor], Tensor]:
        found = processor.post_process_semantic_segmentation(output, target_sizes=list(sizes))
        maps = [
            torch.where((numbers >= 0) & (numbers < classes), numbers, VOID).to(torch.int32).reshape(size)
            for numbers, size in zip(found, sizes, strict=True)
        ]
        return maps, torch.zeros(len(maps), dtype=torch.int32, device=maps[0].device)

    return interpret
