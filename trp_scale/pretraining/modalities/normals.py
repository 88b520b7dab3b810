"""Surface normals in camera coordinates: x points right, y up, z towards the camera.

A stored map holds (n + 1) / 2 of each component n in red, green and blue, times the largest number of its 8 or 16 bits.
Black pixels are unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.data.images.formats import Map
from trp_scale.data.images.maps import MapFormat
from trp_scale.pretraining.modalities.base import Modality, SceneMap
from trp_scale.pretraining.modalities.settings import NormalsSettings

UNKNOWN = 0
"""Value of unknown pixels in all three channels of a stored map."""

SHORTEST = 1e-6
"""Smallest length of a prediction that is normalised to 1."""


class Normals(Modality):
    """Surface normals. Their task is 1 - cosine of the angle to the true normal, or the mean absolute error of the
    components (--normals.loss), at known pixels. An element is a pixel.

    Field of a batch: normals [R, 3, S, S] float32 of length 1, NaN if unknown.
    """

    settings: NormalsSettings
    name = "normals"
    format = MapFormat("normals.png", bits=(8, 16), channels=3, empty=UNKNOWN)

    @classmethod
    def of_scene(cls, scene: Any) -> SceneMap:
        return SceneMap(stored_normals(scene.normals, 16), {})

    def standardise(self, numbers: Map, stored: Any, *, mirrored: bool) -> npt.NDArray[np.float32]:
        """Normalise rounded normals to length 1; mirror their x component with the crop."""
        known = (numbers != UNKNOWN).any(axis=-1, keepdims=True)
        normals = numbers.astype(np.float32) * np.float32(2 / np.iinfo(numbers.dtype).max) - np.float32(1)
        if mirrored:
            normals[..., 0] *= -1
        # No stored number means a component of 0, so no vector has length 0.
        units: npt.NDArray[np.float32] = normals / np.sqrt(np.square(normals).sum(axis=-1, keepdims=True))
        return np.where(known, units, np.float32(np.nan))

    def errors(self, task: str, guess: Tensor, patches: Tensor) -> Tensor:
        vectors, true = _vectors(guess), _vectors(patches)  # [R, N, L, 3]
        known = ~true.isnan().any(-1)  # [R, N, L]
        true = true.nan_to_num(nan=0.0)
        if self.settings.loss == "cosine":
            distances = 1 - (_units(vectors) * true).sum(-1)
        else:
            distances = (vectors - true).abs().mean(-1)
        return torch.where(known, distances, 0.0).sum(-1)

    def reconstruction(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        return _units(_vectors(prediction)).flatten(-2)

    def plainest(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """Return the mean normal of the patches."""
        mean = _vectors(patches).flatten(0, 2).nanmean(0)  # [3]
        return mean.nan_to_num(nan=0.0).repeat(prediction.shape[-1] // 3).expand_as(prediction).contiguous()

    @staticmethod
    def show(axes: Any, image: Tensor, whole: Tensor) -> None:
        """Draw components from -1 (dark) to 1 (bright), unknown pixels grey."""
        axes.imshow(((image + 1) / 2).clamp(0, 1).nan_to_num(nan=0.5).permute(1, 2, 0).numpy())


def stored_normals(normals: npt.NDArray[np.floating[Any]], bits: int) -> Map:
    """Convert normals [H, W, 3] of length 1, NaN if unknown, to stored numbers of 8 or 16 bits."""
    kind = np.uint8 if bits == 8 else np.uint16
    shares = np.rint((normals.astype(np.float64) + 1) / 2 * np.iinfo(kind).max)
    return np.where(np.isnan(normals), UNKNOWN, shares).astype(kind)


def _vectors(patches: Tensor) -> Tensor:
    """[R, N, P] -> [R, N, L, 3]."""
    return patches.reshape(*patches.shape[:-1], -1, 3)


def _units(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1, eps=SHORTEST)
