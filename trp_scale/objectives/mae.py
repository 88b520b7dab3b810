"""The masked autoencoder's objective: the squared error of masked patches (He et al.; AdPE 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trp_scale.batch import Batch, TaskLosses
from trp_scale.config import ObjectiveConfig
from trp_scale.models.mae import MaeOutput
from trp_scale.models.patches import gather_patches, patchify

RECONSTRUCTION = "reconstruction"

CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_DEVIATION = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels in [0, 1]; what enters the model has them taken out, as everywhere in this field."""

TARGET_EPS = 1e-6
"""Added to a patch's variance before its root is taken (He et al.)."""


class MaskedPatchReconstruction:
    """One task: the mean squared error over a masked patch's values, an element being a masked patch.

    The k crops of an image are rows of the model. A hook may add, under `batch.extras`,
        perturbation: what the model's positions are shifted by (trp_scale/models/perturbation.py),
        pixel_shift: [R, k, 3, S, S], of pixels in [0, 1], added to what the model sees; the target stays clean.

    Args:
        config: settings.
        patch_size: side of a patch in pixels.
    """

    tasks: tuple[str, ...] = (RECONSTRUCTION,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = (0,)

    def __init__(self, config: ObjectiveConfig, patch_size: int) -> None:
        self.normalised = config.target == "normalised"
        self.patch_size = patch_size
        self._statistics = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION])  # [2, 3]

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, masked patches of the rows that are there."""
        _, crops, masked = batch["masked"].shape
        return (batch["row_weights"].double().sum() * (crops * masked)).reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., MaeOutput], batch: Batch) -> TaskLosses:
        """Sums over masked patches of their mean squared error, taken in float64 like every task's sum."""
        errors = self.errors(forward, batch)  # [R, k, M]
        rows = errors.double().sum((1, 2)) @ batch["row_weights"].double()
        return TaskLosses(sums=rows.reshape(1), counts=self.count(batch))

    def errors(self, forward: Callable[..., MaeOutput], batch: Batch) -> Tensor:
        """[R, k, M] mean squared error of each masked patch."""
        masked = batch["masked"].flatten(0, 1)  # [B, M], B = R k
        clean = self.patches(batch)  # [B, N, P]
        seen = clean
        if (shift := batch.extras.get("pixel_shift")) is not None:
            seen = self.patches(batch, shift)
        arguments = {}
        if (perturbation := batch.extras.get("perturbation")) is not None:
            arguments["perturbation"] = perturbation
        output = forward(seen, batch["visible"].flatten(0, 1), masked, **arguments)
        difference = output.prediction.float() - self.target(gather_patches(clean, masked))  # [B, M, P]
        return difference.square().mean(-1).view(batch["masked"].shape)

    def patches(self, batch: Batch, pixel_shift: Tensor | None = None) -> Tensor:
        """[B, N, P] float32 patches of the normalised images."""
        images = batch["images"].flatten(0, 1).float() / 255.0  # [B, 3, S, S]
        if pixel_shift is not None:
            images = images + pixel_shift.flatten(0, 1)
        if self._statistics.device != images.device:
            self._statistics = self._statistics.to(images.device)
        mean, deviation = self._statistics.view(2, 1, 3, 1, 1)
        return patchify((images - mean) / deviation, self.patch_size)

    def target(self, patches: Tensor) -> Tensor:
        """[B, M, P] what is predicted of the given patches."""
        patches = patches.detach()
        if not self.normalised:
            return patches
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return (patches - mean) / (variance + TARGET_EPS).sqrt()
