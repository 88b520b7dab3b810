"""What a multi-modal masked autoencoder reconstructs of each modality, as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.downstream.trained_images import TrainedModalities
from trp_scale.upstreams.mm_mae.settings import predicted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = ("input", "seen", "predicted")
"""Rows of the picture for each task."""


@torch.no_grad()
def modality_reconstructions(trained: TrainedModalities, batch: Batch) -> dict[str, dict[str, Tensor]]:
    """Maps to show by task and stage, as `Modality.maps` gives them; what is not seen is shown as unknown.

    What is predicted is shown in masked patches, what is visible elsewhere.
    """
    objective = trained.objective
    patches = objective.patches(batch)
    output = trained.model(objective.seen(patches, batch), batch["visible"])
    hidden = objective.masked(batch)
    shown = {}
    for task, prediction in zip(objective.tasks, output.predictions, strict=True):
        modality = objective.modalities.of(task)
        true, masked = patches[modality.name], hidden[modality.name].unsqueeze(-1)  # [R, N, P], [R, N, 1]
        guess = modality.reconstruction(task, prediction, true)
        unknown = torch.tensor(modality.blank, dtype=true.dtype)
        stages = (true, torch.where(masked, unknown, true), torch.where(masked, guess, true))
        shown[task] = {stage: modality.maps(one) for stage, one in zip(STAGES, stages, strict=True)}
    return shown


@torch.no_grad()
def task_losses(trained: TrainedModalities, batch: Batch) -> dict[str, tuple[float, float]]:
    """Each task's loss on these images, and that of the plainest guess (Modality.plainest): of rgb each patch's mean
    (its normalised values are 0), of raw_rgb the data's mean colour, of depth the image's mean, of semseg these images'
    class frequencies."""
    objective = trained.objective
    losses = objective(trained.model, batch)
    plain = objective(_plainest(trained, batch), batch)
    means = [(one.sums / one.counts.clamp(min=1)).tolist() for one in (losses, plain)]
    return dict(zip(objective.tasks, zip(*means, strict=True), strict=True))


def _plainest(trained: TrainedModalities, batch: Batch) -> Any:
    """A model that makes the plainest guess at every task."""
    objective = trained.objective
    patches = objective.patches(batch)

    def forward(seen: dict[str, Tensor], visible: Tensor) -> Any:
        output = trained.model(seen, visible)
        predictions = []
        for task, prediction in zip(objective.tasks, output.predictions, strict=True):
            modality = objective.modalities.of(task)
            predictions.append(modality.plainest(task, prediction, patches[modality.name]))
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
            predicted(task).load().show(axes[row, column], one, shown[task]["input"][column])
            axes[row, column].set(xticks=[], yticks=[], frame_on=False)
    figure.savefig(path, dpi=100)
