"""What a multi-modal masked autoencoder reconstructs of each modality, as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.downstream.trained_images import TrainedModalities
from trp_scale.models.image_patches import CHANNEL_DEVIATION, CHANNEL_MEAN, TARGET_EPS
from trp_scale.models.patches import unpatchify
from trp_scale.upstreams.mm_mae.tokens import MODALITY_OF, VOID

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = ("input", "seen", "predicted")
"""Rows of the picture for each task."""

GREYED = 0.5
"""What is masked is shown as, of [0, 1]."""


COLOURS = 20
"""Colours of the palette. Classes beyond them take the same colours again."""


@torch.no_grad()
def modality_reconstructions(trained: TrainedModalities, batch: Batch) -> dict[str, dict[str, Tensor]]:
    """Maps to show by task and stage: [R, 3, S, S] in [0, 1] for rgb, raw_rgb; [R, S, S] for depth, standardised, NaN
    where nothing is shown; [R, S / stride, S / stride] labels for semseg, VOID where nothing is shown.

    What is predicted is shown in masked patches, what is visible elsewhere.
    """
    objective = trained.objective
    patches = objective.patches(batch)
    output = trained.model({name: patches[name] for name in objective.inputs}, batch["visible"])
    hidden = objective.masked(batch)
    shown = {}
    for task, prediction in zip(objective.tasks, output.predictions, strict=True):
        shown[task] = _stages(trained, task, patches, prediction, hidden[MODALITY_OF[task]].unsqueeze(-1))
    return shown


def _stages(
    trained: TrainedModalities, task: str, patches: dict[str, Tensor], prediction: Tensor, masked: Tensor
) -> dict[str, Tensor]:
    """Maps of one task; masked: [R, N, 1]."""
    patch_size = trained.objective.patch_size
    if task == "semseg":
        labels = patches["semseg"].long()  # [R, N, L]
        guess = prediction.view(*labels.shape, -1).argmax(-1)
        side = trained.objective.label_patch
        values = (labels, torch.where(masked, VOID, labels), torch.where(masked, guess, labels))
        return {stage: unpatchify(value, side)[:, 0] for stage, value in zip(STAGES, values, strict=True)}
    if task == "depth":
        true = torch.where(patches["measured"], patches["depth"], torch.nan)
        values = (true, torch.where(masked, torch.nan, true), torch.where(masked, prediction, true))
        return {stage: unpatchify(value, patch_size)[:, 0] for stage, value in zip(STAGES, values, strict=True)}
    true = patches["rgb"]
    if task == "rgb":  # the true patch's mean and deviation are put back, as is usual
        variance, mean = torch.var_mean(true, dim=-1, keepdim=True)
        prediction = prediction * (variance + TARGET_EPS).sqrt() + mean
    channel_mean, deviation = torch.tensor([CHANNEL_MEAN, CHANNEL_DEVIATION]).view(2, 1, 3, 1, 1)
    pixels = unpatchify(true, patch_size) * deviation + channel_mean
    guessed = unpatchify(prediction, patch_size) * deviation + channel_mean
    hidden = unpatchify(masked.expand_as(true).float(), patch_size) > 0
    values = (pixels, torch.where(hidden, GREYED, pixels), torch.where(hidden, guessed, pixels))
    return {stage: value.clamp(0, 1) for stage, value in zip(STAGES, values, strict=True)}


@torch.no_grad()
def task_losses(trained: TrainedModalities, batch: Batch) -> dict[str, tuple[float, float]]:
    """Each task's loss on these images, and that of the plainest guess: of rgb each patch's mean (its normalised values
    are 0), of raw_rgb the data's mean colour, of depth the image's mean, of semseg these images' class frequencies."""
    objective = trained.objective
    losses = objective(trained.model, batch)
    plain = objective(_plainest(trained, batch), batch)
    means = [(one.sums / one.counts.clamp(min=1)).tolist() for one in (losses, plain)]
    return dict(zip(objective.tasks, zip(*means, strict=True), strict=True))


def _plainest(trained: TrainedModalities, batch: Batch) -> Any:
    """A model that predicts 0 everywhere, and the frequencies of the classes."""

    def forward(patches: dict[str, Tensor], visible: Tensor) -> Any:
        output = trained.model(patches, visible)
        predictions = []
        for task, prediction in zip(trained.objective.tasks, output.predictions, strict=True):
            guess = torch.zeros_like(prediction)
            if task == "semseg":
                labels = trained.objective.patches(batch)["semseg"].long()
                classes = prediction.shape[-1] // labels.shape[-1]
                known = F.one_hot(labels[labels != VOID], classes).float()
                logits = known.mean(0).clamp(min=1e-6).log()  # [C]
                guess = logits.repeat(labels.shape[-1]).expand_as(prediction).contiguous()
            predictions.append(guess)
        return output._replace(predictions=tuple(predictions))

    return forward


def draw_modalities(figure_of: type[Figure], shown: dict[str, dict[str, Tensor]], path: Path) -> None:
    """Three rows for each task, a column for each image."""
    rows = [(task, stage, maps) for task, stages in shown.items() for stage, maps in stages.items()]
    count = len(rows[0][2])
    figure = figure_of(figsize=(1.1 * count + 0.6, 1.1 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), count, squeeze=False)
    for row, (task, stage, maps) in enumerate(rows):
        axes[row, 0].set_ylabel(f"{task}\n{stage}", fontsize=8)
        for column, one in enumerate(maps):
            limits = shown[task]["input"][column]
            show_modality(axes[row, column], task, one, limits)
            axes[row, column].set(xticks=[], yticks=[], frame_on=False)
    figure.savefig(path, dpi=100)


def show_modality(axes: Axes, task: str, one: Tensor, whole: Tensor) -> None:
    """One map: [3, H, W] in [0, 1], depth [H, W] or class numbers [H, W]; the colours of a depth map are from the
    smallest to the largest of the whole image's."""
    if task == "semseg":
        colours = torch.where(one == VOID, torch.nan, (one % COLOURS).float())  # neighbours in the list differ
        axes.imshow(colours.numpy(), cmap="tab20", vmin=0, vmax=COLOURS - 1)
    elif task == "depth":
        known = whole[~whole.isnan()]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        axes.imshow(one.numpy(), cmap="viridis", vmin=low, vmax=high)
    else:
        axes.imshow(one.permute(1, 2, 0).numpy())
