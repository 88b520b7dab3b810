"""Errors of predicted depth (Eigen et al. 2014; TRP 4.3.2 reports delta_1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.downstream.dense.depth_objective import DepthSpace
from trp_scale.downstream.task import GatheredRows

DELTA = 1.25

NAMES = ("delta_1", "delta_2", "delta_3", "rmse", "rel", "log10")

EIGEN = (45 / 480, 471 / 480, 41 / 640, 601 / 640)
"""Top, bottom, left and right of the measured region of NYUv2, as shares of the height and width."""


class DepthErrors:
    """Collects each image's sums of errors; see `Metrics`. All ranks' images are added in stored order, so any number
    of ranks gives the same figures.

    Args:
        space: of what the model predicts.
        alignment: none, or scale_shift.
        region: whole or eigen.
    """

    def __init__(
        self,
        space: DepthSpace,
        alignment: Literal["none", "scale_shift"] = "none",
        region: Literal["whole", "eigen"] = "whole",
    ) -> None:
        self._space, self._alignment, self._region = space, alignment, region
        self._rows = GatheredRows()

    def add(self, outputs: Sequence[Tensor], batch: Batch) -> None:
        """Each row's predicted targets [H, W], before they become depth."""
        found, constants = [], []
        for row, (predicted, (height, width)) in enumerate(zip(outputs, batch["sizes"].tolist(), strict=True)):
            true = batch["whole_depth"][row, :height, :width].double()
            there = (true > 0) & measured_region(height, width, self._region, true.device)
            found.append(self._sums(predicted.double()[there], true[there]))
            constants.append(self._sums(torch.full_like(true[there], self._space.mean), true[there]))
        self._rows.add(batch, sums=torch.stack(found), constant=torch.stack(constants))

    def _sums(self, predicted: Tensor, true: Tensor) -> Tensor:
        target = self._space.target(true)
        if self._alignment == "scale_shift":
            predicted = aligned(predicted, target)
        return error_sums(self._space.depth(predicted), true)

    def finish(self, group: Group) -> dict[str, Any]:
        """Over all measured pixels, and under "detail" the means over images of each image's own figures.
        constant_delta_1 is delta_1 of predicting the training maps' mean everywhere.

        Raises:
            RefusedError: no pixel was measured.
        """
        rows = self._rows.gather(group)
        sums = rows["sums"]  # [n, 7]
        if not sums[:, 0].sum():
            raise RefusedError(
                "no measured pixel in the maps that are measured on; look at --dense.min_depth, --dense.max_depth and "
                "--dense.region"
            )
        images = sums[sums[:, 0] > 0]
        return {
            **figures(sums.sum(0)),
            "constant_delta_1": figures(rows["constant"].sum(0))["delta_1"],
            "detail": {
                "mean_over_images": {name: float(np.mean([figures(one)[name] for one in images])) for name in NAMES},
                "pixels": int(sums[:, 0].sum()),
                "images": len(images),
            },
        }


def error_sums(predicted: Tensor, true: Tensor) -> Tensor:
    """[7] float64: number of pixels, then of each of NAMES the sum of what its mean is taken of.

    Args:
        predicted, true: [n] positive depth.
    """
    ratio = torch.maximum(predicted / true, true / predicted)
    logarithms = (predicted.log10() - true.log10()).abs()
    parts = [torch.ones_like(true), *((ratio < DELTA**power).to(true.dtype) for power in (1, 2, 3))]
    parts += [(predicted - true).square(), (predicted - true).abs() / true, logarithms]
    return torch.stack(parts).sum(1, dtype=torch.float64)


def figures(sums: Any) -> dict[str, float]:
    """The figures of `error_sums`: delta_k the share of pixels with max(p / t, t / p) < 1.25^k; rmse in the depth's
    unit; rel the mean of |p - t| / t; log10 the mean of |log10 p - log10 t|."""
    means = dict(zip(NAMES, (sums[1:] / sums[0]).tolist(), strict=True))
    return {**means, "rmse": means["rmse"] ** 0.5}


def aligned(predicted: Tensor, target: Tensor) -> Tensor:
    """s predicted + b, with s and b that make the squared difference to the target smallest (Ranftl et al. 2022); of a
    constant prediction the target's mean.

    Args:
        predicted, target: [n] float64.
    """
    if not len(target):
        return predicted
    centred, wanted = predicted - predicted.mean(), target - target.mean()
    variance = centred @ centred
    scale = torch.where(variance > 0, centred @ wanted / variance.clamp(min=torch.finfo(variance.dtype).tiny), 0.0)
    return scale * centred + target.mean()


def measured_region(
    height: int, width: int, region: Literal["whole", "eigen"], device: torch.device | None = None
) -> Tensor:
    """[H, W] bool: pixels that are measured."""
    mask = torch.ones(height, width, dtype=torch.bool, device=device)
    if region == "eigen":
        top, bottom, left, right = EIGEN
        mask[: round(top * height)] = mask[round(bottom * height) :] = False
        mask[:, : round(left * width)] = mask[:, round(right * width) :] = False
    return mask
