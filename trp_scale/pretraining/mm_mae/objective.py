"""The multi-modal masked autoencoder's objective: masked patches of each output modality (TRP 4.2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.objective import Tap, TapPlace
from trp_scale.pretraining.mm_mae.model import MultimodalOutput
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.tokens import RunModalities, visible_slots

TASK_TAPS = Extra("task_taps")
"""Argument of the model that takes the taps, under which they are in `Batch.extras`."""


class MultimodalReconstruction:
    """A task for each output, whose errors its modality says (trp_scale/pretraining/modalities).

    Losses are of masked patches only; of an output that is no input every patch is masked. What a task's sum and count
    are follows objective.reduction; an element is what the modality says, a pixel or a whole patch:
        sample: each row's mean over its elements, and the rows that have any;
        element: over all elements, and their number.

    A hook may add PIXEL_SHIFT [R, 3, S, S] to `batch.extras`: it is added to what the model
    sees of rgb; the target stays clean.

    Args:
        config: settings.
    """

    in_a_graph = True

    def __init__(self, config: MmMaeConfig) -> None:
        self.modalities = RunModalities(config)
        self.inputs: tuple[str, ...] = self.modalities.inputs
        self.tasks: tuple[str, ...] = self.modalities.tasks
        self.balanced: tuple[int, ...] = tuple(range(len(self.tasks)))
        self.regression: tuple[int, ...] = tuple(
            number for number, task in enumerate(self.tasks) if self.modalities.output_modality(task).regression
        )
        self.per_sample = config.objective.reduction == "sample"
        self.patches_per_row = (config.crops.size // config.vision.patch_size) ** 2
        self.hidden_size = config.model.hidden_size

    def count(self, batch: Batch) -> Tensor:
        """[T] float64, from `visible` and what the modalities count alone."""
        rows = self.elements(batch).sum(2)  # [T, R]
        return ((rows > 0).double() if self.per_sample else rows).sum(1)

    def elements(self, batch: Batch) -> Tensor:
        """[T, R, N] float64, elements of each patch; 0 where it is visible."""
        masked = self.masked_patches(batch)
        predicted = [self.modalities.output_modality(task) for task in self.tasks]
        return torch.stack([modality.elements(batch) * masked[modality.name] for modality in predicted])

    def masked_patches(self, batch: Batch) -> dict[str, Tensor]:
        """[R, N] bool for each modality that is predicted: patches that the encoder does not see, all of them where it
        is no input."""
        visible, count = batch["visible"], self.patches_per_row
        slots = visible_slots(visible, len(self.inputs) * count)
        masked = (slots == visible.shape[1]).view(len(visible), len(self.inputs), count)  # [R, I, N]
        every = torch.ones_like(masked[:, 0])
        predicted = {self.modalities.output_modality(task).name for task in self.tasks}
        return {
            name: masked[:, self.inputs.index(name)] if name in self.inputs else every for name in sorted(predicted)
        }

    def outside_weights(self, counts: Tensor) -> Tensor:
        """No task is outside the balance."""
        return torch.zeros_like(counts)

    def __call__(self, forward: Callable[..., MultimodalOutput], batch: Batch) -> TaskLosses:
        """Sums of the tasks' losses, taken in float64 like every task's sum; of a task without elements exactly 0."""
        patches = self.patches(batch)
        taps = {TASK_TAPS: batch.extras[TASK_TAPS]} if TASK_TAPS in batch.extras else {}
        output = forward(self.seen(patches, batch), batch["visible"], **taps)
        elements = self.elements(batch)  # [T, R, N]
        errors = torch.stack(
            [
                self._errors(task, prediction, patches)
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
        """[R, N, P] patches of each modality that is seen or predicted."""
        return {name: modality.patches(batch) for name, modality in self.modalities.used.items()}

    def seen(self, patches: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """[R, N, P] what the model sees of the patches of each input, masked or not."""
        return {name: self.modalities.used[name].seen(patches[name], batch) for name in self.inputs}

    def _errors(self, task: str, prediction: Tensor, patches: dict[str, Tensor]) -> Tensor:
        """[R, N] sum of a task's losses over the elements of each patch, masked or not, in fp32 at least."""
        guess = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        modality = self.modalities.output_modality(task)
        return modality.errors(task, guess, patches[modality.name])

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        """Every task passes the encoder's last matrix, whose output is what the decoders share."""
        return self.balanced

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """Return the tap on each decoder's input from the encoder, [T, R, 1 + V, D], which is both places."""
        rows, visible = batch["visible"].shape
        return Tap(TASK_TAPS, (len(self.tasks), rows, 1 + visible, self.hidden_size))

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """[R (1 + V), D] for each task."""
        return dict(enumerate(gradient.flatten(1, 2).unbind(0)))
