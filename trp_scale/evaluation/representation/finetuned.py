"""What fine-tuned runs make of the same images, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trp_scale.config import Config, RefusedError
from trp_scale.evaluation.compare import names
from trp_scale.evaluation.pictures import Picture
from trp_scale.evaluation.representation.figures import draw_activations
from trp_scale.evaluation.representation.grad_cam import class_activation, load_classifier
from trp_scale.evaluation.representation.images import ImageChoice, read_images, reading_settings
from trp_scale.evaluation.representation.study import ShownImages
from trp_scale.objectives.classification import Pixels


def finetuned_pictures(runs: Sequence[Path], choice: ImageChoice, shown: ShownImages, output: Path) -> list[Picture]:
    """Draw grad_cam.png of classifiers; nothing without runs.

    Raises:
        RefusedError: a run is none of a classifier, or of other classes than the data has.
    """
    if not runs:
        return []
    maps = {name: _activations(run, choice, shown) for name, run in zip(names(runs), runs, strict=True)}
    path = output / "grad_cam.png"
    captions = [choice.class_name(label) if label >= 0 else "" for label in shown.labels.tolist()]
    draw_activations(shown.images, captions, maps, path)
    return [
        Picture(
            path,
            "Grad-CAM of the predicted class on the first norm of the last block; red: what speaks for it most, each "
            "image on its own scale; green words: predicted right",
        )
    ]


def _activations(run: Path, choice: ImageChoice, shown: ShownImages) -> tuple[Tensor, list[tuple[str, bool]]]:
    """[R, G, G], and each prediction with whether it is right."""
    model, config = load_classifier(run)
    if choice.classes is not None and len(choice.classes) != config.downstream.classes:
        raise RefusedError(
            f"--run {run}: {config.downstream.classes} classes, {choice.data} has {len(choice.classes)}; allowed: "
            "a run of the same classes"
        )
    settings = reading_settings(Config(), config.crops.size)
    batches = read_images(settings, choice.data, choice.positions[: len(shown.labels)])
    where, pixels = model.head.weight.device, Pixels()
    found = [class_activation(model, pixels(batch["images"].flatten(0, 1).to(where))) for batch in batches]
    predicted = torch.cat([one.predicted for one in found]).tolist()
    words = [(choice.class_name(guess), guess == label) for guess, label in zip(predicted, shown.labels, strict=True)]
    return torch.cat([one.maps for one in found]).cpu(), words
