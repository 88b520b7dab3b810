"""The multi-modal masked autoencoder's objective: masked patches of each output modality (TRP 4.2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.objective import Tap, TapPlace
from trp_scale.models.image_patches import ImagePatches, normalised
from trp_scale.models.patches import patchify
from trp_scale.upstreams.mm_mae.model import MultimodalOutput
from trp_scale.upstreams.mm_mae.tokens import MODALITY_OF, VOID, visible_slots

TASK_TAPS = "task_taps"
"""Argument of the model that takes the taps, under which they are in `Batch.extras`."""


class MultimodalReconstruction:
    """A task for each output: rgb, the squared error of pixels with each patch's mean and deviation taken out; raw_rgb,
    of pixels as they are; depth, the absolute error of standardised depth where it was measured; semseg, the
    cross-entropy of labels that are not void.

    Losses are of masked patches only; of an output that is no input every patch is masked. An element is a patch of rgb
    and raw_rgb (its loss is the mean over its values), a pixel of depth, a label of semseg. What a task's sum and count
    are follows objective.reduction:
        sample: each row's mean over its elements, and the rows that have any;
        element: over all elements, and their number.

    A hook may add `pixel_shift` [R, 3, S, S], of pixels in [0, 1], under `batch.extras`: it is added to what the model
    sees of rgb; the target stays clean.

    Args:
        config: settings.
    """

    def __init__(self, config: Config) -> None:
        modalities, self.patch_size = config.modalities, config.vision.patch_size
        self.inputs: tuple[str, ...] = tuple(modalities.inputs)
        self.tasks: tuple[str, ...] = tuple(modalities.outputs)
        self.balanced: tuple[int, ...] = tuple(range(len(self.tasks)))
        self.regression: tuple[int, ...] = tuple(t for t, task in enumerate(self.tasks) if task != "semseg")
        self.per_sample = config.objective.reduction == "sample"
        self.patches_per_row = (config.crops.size // self.patch_size) ** 2
        self.label_patch = self.patch_size // modalities.segmentation_stride
        self.hidden_size = config.model.hidden_size
        self._image_patches = ImagePatches(self.patch_size)

    def count(self, batch: Batch) -> Tensor:
        """[T] float64, from `visible`, the patches' counts and `row_weights` alone."""
        rows = self.elements(batch).sum(2)  # [T, R]
        return ((rows > 0).double() if self.per_sample else rows).sum(1)

    def elements(self, batch: Batch) -> Tensor:
        """[T, R, N] float64, elements of each patch; 0 where it is visible."""
        masked = self.masked(batch)

        def of_task(task: str) -> Tensor:
            modality = MODALITY_OF[task]
            if modality == "rgb":
                return batch["row_weights"].double().unsqueeze(1) * masked[modality]
            return batch[f"{modality}_counts"].double() * masked[modality]

        return torch.stack([of_task(task) for task in self.tasks])

    def masked(self, batch: Batch) -> dict[str, Tensor]:
        """[R, N] bool for each modality that is predicted: patches that the encoder does not see, all of them where it
        is no input."""
        visible, count = batch["visible"], self.patches_per_row
        slots = visible_slots(visible, len(self.inputs) * count)
        masked = (slots == visible.shape[1]).view(len(visible), len(self.inputs), count)  # [R, I, N]
        every = torch.ones_like(masked[:, 0])
        predicted = {MODALITY_OF[task] for task in self.tasks}
        return {
            name: masked[:, self.inputs.index(name)] if name in self.inputs else every for name in sorted(predicted)
        }

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., MultimodalOutput], batch: Batch) -> TaskLosses:
        """Sums of the tasks' losses, taken in float64 like every task's sum; of a task without elements exactly 0."""
        patches = self.patches(batch)
        seen = {modality: patches[modality] for modality in self.inputs}
        if (shift := batch.extras.get("pixel_shift")) is not None:
            seen["rgb"] = self._image_patches(batch["images"], shift)
        taps = {TASK_TAPS: batch.extras[TASK_TAPS]} if TASK_TAPS in batch.extras else {}
        output = forward(seen, batch["visible"], **taps)
        elements = self.elements(batch)  # [T, R, N]
        errors = torch.stack(
            [
                self.errors(task, prediction, patches)
                for task, prediction in zip(self.tasks, output.predictions, strict=True)
            ]
        )  # [T, R, N]
        rows = torch.where(elements > 0, errors.double(), 0.0).sum(2)  # [T, R]
        counts = elements.sum(2)
        if self.per_sample:
            rows, counts = rows / counts.clamp(min=1), (counts > 0).double()
        shared = output.shared_inputs
        return TaskLosses(
            sums=rows.sum(1),
            counts=counts.sum(1),
            shared_inputs=None if shared is None else shared.flatten(0, 1),  # [R (1 + V), intermediate]
        )

    def patches(self, batch: Batch) -> dict[str, Tensor]:
        """What is seen and predicted of each modality, [R, N, P]: normalised pixels; depth, 0 where there is no
        measurement, which is the mean of what there is; labels. Under `measured` where depth is, bool."""
        patches = {"rgb": self._image_patches(batch["images"])}
        if "depth" in (*self.inputs, *self.tasks):
            depth = patchify(batch["depth"].unsqueeze(1), self.patch_size)
            patches["measured"] = ~depth.isnan()
            patches["depth"] = depth.nan_to_num(nan=0.0)
        if "semseg" in (*self.inputs, *self.tasks):
            patches["semseg"] = patchify(batch["semseg"].unsqueeze(1), self.label_patch)
        return patches

    def errors(self, task: str, prediction: Tensor, patches: dict[str, Tensor]) -> Tensor:
        """[R, N] sum of a task's losses over the elements of each patch, masked or not, in fp32 at least."""
        guess = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        if task == "semseg":
            labels = patches["semseg"].long()  # [R, N, L]
            logits = guess.view(labels.numel(), -1)  # [R N L, C]
            losses = F.cross_entropy(logits, labels.flatten(), ignore_index=VOID, reduction="none")
            return losses.view(labels.shape).sum(-1)
        if task == "depth":
            return torch.where(patches["measured"], (guess - patches["depth"]).abs(), 0.0).sum(-1)
        target = normalised(patches["rgb"]) if task == "rgb" else patches["rgb"]
        return (guess - target).square().mean(-1)

    def tapped(self, at: TapPlace) -> tuple[int, ...]:
        """Every task passes the encoder's last matrix, whose output is what the decoders share."""
        return self.balanced

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """At what each decoder reads of the encoder, [T, R, 1 + V, D]: both places are there."""
        rows, visible = batch["visible"].shape
        return Tap(TASK_TAPS, (len(self.tasks), rows, 1 + visible, self.hidden_size))

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """[R (1 + V), D] for each task."""
        return dict(enumerate(gradient.flatten(1, 2).unbind(0)))
