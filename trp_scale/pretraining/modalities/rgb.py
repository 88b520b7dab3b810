"""The image, predicted with or without normalisation of each patch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, Crops, cut_images
from trp_scale.data.images.dataset import DecodedRows
from trp_scale.data.images.formats import Map
from trp_scale.data.images.maps import StoredMaps
from trp_scale.models.patches import (
    CHANNEL_DEVIATION,
    CHANNEL_MEAN,
    TARGET_EPS,
    ImagePatches,
    normalise_patches,
    unpatchify,
)
from trp_scale.models.positions import PIXEL_SHIFT
from trp_scale.pretraining.modalities.base import Modality

RAW = "raw_rgb"

HIDDEN = 0.5
"""Grey of missing pixels in pictures, of [0, 1]."""


class Rgb(Modality):
    """RGB. Tasks: rgb, the squared error of pixels normalised by each patch's mean and deviation (He et al.); raw_rgb,
    of pixels normalised by ImageNet's mean and deviation. An element is a patch.

    Field of a batch: images [R, 3, S, S] uint8.
    """

    name = "rgb"
    format = None

    def __init__(self, settings: Any, patch_size: int) -> None:
        super().__init__(settings, patch_size)
        self._image_patches = ImagePatches(patch_size)

    def fields(
        self, rows: DecodedRows, crops: Crops, cropper: Cropper, stored: Sequence[StoredMaps]
    ) -> dict[str, Tensor]:
        return {"images": cut_images(cropper, crops, rows).squeeze(1)}  # [R, 3, S, S]

    def standardise(self, numbers: Map, stored: Any, *, mirrored: bool) -> npt.NDArray[Any]:
        raise NotImplementedError("images stay bytes in a batch; the device normalises them")

    def patches(self, batch: Batch) -> Tensor:
        return self._image_patches(batch["images"])

    def seen(self, patches: Tensor, batch: Batch) -> Tensor:
        """Add the extra `pixel_shift` [R, 3, S, S], which a hook may set."""
        shift = batch.extras.get(PIXEL_SHIFT)
        return patches if shift is None else self._image_patches(batch["images"], shift)

    def elements(self, batch: Batch) -> Tensor:
        return batch["row_weights"].double().unsqueeze(1)  # [R, 1]

    def errors(self, task: str, guess: Tensor, patches: Tensor) -> Tensor:
        target = patches if task == RAW else normalise_patches(patches)
        return (guess - target).square().mean(-1)

    def reconstruction(self, task: str, prediction: Tensor, patches: Tensor) -> Tensor:
        """Return the prediction; for rgb with the true patch's mean and deviation, as is usual."""
        if task == RAW:
            return prediction
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        restored: Tensor = prediction * (variance + TARGET_EPS).sqrt() + mean
        return restored

    def maps(self, patches: Tensor) -> Tensor:
        """[R, 3, S, S] in [0, 1]."""
        mean, deviation = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION]).view(2, 1, 3, 1, 1)
        pixels: Tensor = unpatchify(patches, self.patch_size) * deviation + mean
        return pixels.clamp(0, 1).nan_to_num(nan=HIDDEN)

    @staticmethod
    def show(axes: Any, image: Tensor, whole: Tensor) -> None:
        axes.imshow(image.permute(1, 2, 0).numpy())
