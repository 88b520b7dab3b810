"""Surface normals: the direction in which each pixel's surface faces, seen from the camera.

x points right, y up and z towards the camera. A stored map holds (n + 1) / 2 of each component n, in red, green and
blue, as a share of the largest number of its 8 or 16 bits. Black: nothing is known there.
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
"""In all three channels of a stored map."""

SHORTEST = 1e-6
"""Length from which on a prediction has a direction."""


class Normals(Modality):
    """Surface normals. Their task: 1 - cosine of the angle to the true normal, or the mean absolute error of the three
    components (--normals.loss), where the normal is known. An element is a pixel.

    The batch has them as normals [R, 3, S, S] float32 of length 1, not a number where nothing is known.
    """

    settings: NormalsSettings
    name = "normals"
    format = MapFormat("normals.png", bits=(8, 16), channels=3, empty=UNKNOWN)

    @classmethod
    def of_scene(cls, scene: Any) -> SceneMap:
        return SceneMap(stored_normals(scene.normals, 16), {})

    def standardise(self, numbers: Map, stored: Any, *, mirrored: bool) -> npt.NDArray[np.float32]:
        """Normalise to length 1, since stored numbers are rounded; a mirrored surface faces the other side."""
        known = (numbers != UNKNOWN).any(axis=-1, keepdims=True)
        normals = numbers.astype(np.float32) * np.float32(2 / np.iinfo(numbers.dtype).max) - np.float32(1)
        if mirrored:
            normals[..., 0] *= -1
        # No stored number is 0 as a component, so that no vector has length 0.
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
        """The mean of these patches' normals."""
        mean = _vectors(patches).flatten(0, 2).nanmean(0)  # [3]
        return mean.nan_to_num(nan=0.0).repeat(prediction.shape[-1] // 3).expand_as(prediction).contiguous()

    @staticmethod
    def show(axes: Any, image: Tensor, whole: Tensor) -> None:
        """Each component from -1, dark, to 1, bright; grey where nothing is known."""
        axes.imshow(((image + 1) / 2).clamp(0, 1).nan_to_num(nan=0.5).permute(1, 2, 0).numpy())


def stored_normals(normals: npt.NDArray[np.floating[Any]], bits: int) -> Map:
    """Normals as they are stored.

    Args:
        normals: [H, W, 3] of length 1; not a number where nothing is known.
        bits: 8 or 16, of each component.
    """
    kind = np.uint8 if bits == 8 else np.uint16
    shares = np.rint((normals.astype(np.float64) + 1) / 2 * np.iinfo(kind).max)
    return np.where(np.isnan(normals), UNKNOWN, shares).astype(kind)


def _vectors(patches: Tensor) -> Tensor:
    """[R, N, P] -> [R, N, L, 3]: the channels of each place lie side by side."""
    return patches.reshape(*patches.shape[:-1], -1, 3)


def _units(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1, eps=SHORTEST)
