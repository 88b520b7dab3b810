"""What fine-tuned classifiers decide by, on the same images, side by side (MLO-MAE Figure 5)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trp_scale.distributed.environment import Environment
from trp_scale.downstream.classification.model import ImageClassifier
from trp_scale.downstream.classification.objective import Pixels
from trp_scale.downstream.finetuned_run import FinetunedRun, predicting_engine
from trp_scale.downstream.pictures import Picture
from trp_scale.downstream.representation.figures import Decision, draw_activations
from trp_scale.downstream.representation.grad_cam import class_activation
from trp_scale.downstream.representation.images import measured_images
from trp_scale.downstream.representation.study import ShownImages


def classifier_pictures(
    runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw grad_cam.png.

    Args:
        runs: of classification, by name.
    """
    decisions = {name: _decisions(run, shown, environment) for name, run in runs.items()}
    path = output / "grad_cam.png"
    captions = [shown.choice.class_name(label) for label in shown.labels.tolist()]
    draw_activations(shown.images, captions, decisions, path)
    return [
        Picture(
            path,
            "Grad-CAM of the predicted class on the first norm of the last block; red: what speaks for it most, each "
            "image on its own scale; green words: predicted right",
        )
    ]


def _decisions(run: FinetunedRun, shown: ShownImages, environment: Environment) -> list[Decision]:
    """What the run decides of each image, seen as it is measured."""
    model = ImageClassifier(run.config)
    predicting_engine(model, run, environment)
    model.eval()
    names, pixels, found = run.classes or shown.choice.classes, Pixels(), []
    labels = iter(shown.labels.tolist())
    for batch in measured_images(run.config, shown.choice):
        seen = batch["images"]  # [B, 3, S, S]
        maps, predicted = class_activation(model, pixels(seen.to(environment.device)))
        for image, one, guess in zip(seen.float() / 255.0, maps.cpu(), predicted.tolist(), strict=True):
            word = names[guess] if names else str(guess)
            found.append(Decision(image=image, map=one, prediction=word, right=guess == next(labels)))
    return found
