"""The masked autoencoder's objective: the squared error of masked patches (He et al.; AdPE 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.objective import GATE, PATCH_WEIGHTS
from trp_scale.models.patches import ImagePatches, gather_patches, normalise_patches
from trp_scale.models.positions import PERTURBATION, PIXEL_SHIFT
from trp_scale.pretraining.mae.model import MaeOutput, Wanted
from trp_scale.pretraining.mae.settings import MaeObjectiveConfig

RECONSTRUCTION = "reconstruction"


class MaskedPatchReconstruction:
    """One task: the mean squared error over a masked patch's values, an element being a masked patch.

    The k crops of an image are rows of the model. A hook may add, under `batch.extras`,
        perturbation: what the model's positions are shifted by (trp_scale/models/positions.py),
        pixel_shift: [R, k, 3, S, S], of pixels in [0, 1], added to what the model sees; the target stays clean,
        patch_weights: [R, k, M], by which each masked patch's error counts (MLO-MAE eq. 1),
        gate: [R, k, V], by which the tokens of visible patches are multiplied.

    Args:
        config: settings.
        patch_size: side of a patch in pixels.
    """

    tasks: tuple[str, ...] = (RECONSTRUCTION,)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = (0,)
    in_a_graph = True

    def __init__(self, config: MaeObjectiveConfig, patch_size: int) -> None:
        self.normalised = config.target == "normalised"
        self.patch_size = patch_size
        self._image_patches = ImagePatches(patch_size)

    def count(self, batch: Batch) -> Tensor:
        """[1] float64, masked patches of the rows that are there."""
        _, crops, masked = batch["masked"].shape
        return (batch["row_weights"].double().sum() * (crops * masked)).reshape(1)

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., MaeOutput], batch: Batch) -> TaskLosses:
        """Sums over masked patches of their mean squared error, taken in float64 like every task's sum."""
        return self.losses(self.errors(forward, batch), batch)

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """The sums for given errors [R, k, M]; linear in them."""
        errors = errors.double()
        if (weights := batch.extras.get(PATCH_WEIGHTS)) is not None:
            errors = errors * weights
        rows = errors.sum((1, 2)) @ batch["row_weights"].double()
        return TaskLosses(sums=rows.reshape(1), counts=self.count(batch))

    def errors(self, forward: Callable[..., MaeOutput], batch: Batch) -> Tensor:
        """[R, k, M] mean squared error of each masked patch."""
        clean = self.patches(batch)  # [B, N, P], B = R k
        return self.compute_errors(self.run(forward, batch, clean).prediction, batch, clean)

    def run(self, forward: Callable[..., Any], batch: Batch, clean: Tensor, **wanted: Wanted) -> Any:
        """Return the model's output for a batch, its patches [B, N, P], and the hooks' extras; `wanted` is its
        `give`."""
        seen = clean
        if (shift := batch.extras.get(PIXEL_SHIFT)) is not None:
            seen = self.patches(batch, shift)
        arguments: dict[str, Any] = {**wanted}
        if (perturbation := batch.extras.get(PERTURBATION)) is not None:
            arguments["perturbation"] = perturbation
        if (gate := batch.extras.get(GATE)) is not None:
            arguments["gate"] = gate.flatten(0, 1)
        return forward(seen, batch["visible"].flatten(0, 1), batch["masked"].flatten(0, 1), **arguments)

    def compute_errors(self, prediction: Tensor, batch: Batch, clean: Tensor) -> Tensor:
        """[R, k, M] of a prediction [B, M, P], against the clean patches [B, N, P]."""
        target = self.target(gather_patches(clean, batch["masked"].flatten(0, 1)))  # [B, M, P]
        wide = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        return (wide - target).square().mean(-1).view(batch["masked"].shape)

    def patches(self, batch: Batch, pixel_shift: Tensor | None = None) -> Tensor:
        """[B, N, P] float32 patches of the normalised images."""
        shift = None if pixel_shift is None else pixel_shift.flatten(0, 1)
        return self._image_patches(batch["images"].flatten(0, 1), shift)

    def target(self, patches: Tensor) -> Tensor:
        """[B, M, P] what is predicted of the given patches."""
        patches = patches.detach()
        return normalise_patches(patches) if self.normalised else patches
