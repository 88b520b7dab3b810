"""Evidence for the decisions of fine-tuned classifiers, side by side.

Grad-CAM: Selvaraju et al. 2017, eq. 1-2; MLO-MAE Figure 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.figures.figures import Decision, draw_activations
from trp_scale.evaluation.figures.finetuned import FinetunedPictures
from trp_scale.evaluation.figures.pictures import Picture
from trp_scale.evaluation.figures.study import ImageChoice, ShownImages, measured_images
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import ImageClassifier
from trp_scale.finetuning.finetuned_run import FinetunedRun, predicting_engine
from trp_scale.models.patches import Pixels


class ClassActivation(NamedTuple):
    """Grad-CAM of each image.

    Attributes:
        maps: [B, G, G], zero or more, not scaled.
        predicted: [B] class with the highest logit.
    """

    maps: Tensor
    predicted: Tensor


def grad_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """[B, N, D] features of patches and the gradient of a class's logit there -> [B, G, G].

    A feature's weight is its gradient averaged over the patches (eq. 1); a patch's value is the weighted sum of its
    features, negative ones as 0 (eq. 2).
    """
    weights = gradients.mean(1, keepdim=True)  # [B, 1, D]
    values = F.relu((weights * activations).sum(-1))  # [B, N]
    grid = round(values.shape[1] ** 0.5)
    return values.reshape(-1, grid, grid)


def class_activation(model: ImageClassifier, images: Tensor, classes: Tensor | None = None) -> ClassActivation:
    """Grad-CAM on the first norm of the last block, as MLO-MAE has it, over the patches.

    Args:
        model: in evaluation mode.
        images: [B, 3, S, S] normalised.
        classes: [B] whose logit is explained; None = the predicted one.
    """
    kept: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    handle = model.encoder.blocks[-1].norm1.register_forward_hook(keep)  # type: ignore[union-attr]
    try:
        with torch.enable_grad():
            logits = model(images)  # [B, C]
    finally:
        handle.remove()
    predicted = logits.argmax(1)
    explained = logits.gather(1, (predicted if classes is None else classes).unsqueeze(1))
    # Images do not meet in the model, so the sum's gradient is each image's own.
    (gradients,) = torch.autograd.grad(explained.sum(), kept[0])  # [B, 1 + N, D]
    return ClassActivation(grad_cam(kept[0].detach()[:, 1:], gradients[:, 1:]), predicted)


class ClassifierPictures(FinetunedPictures):
    """grad_cam.png; see `FinetunedPictures`."""

    @staticmethod
    def check(run: FinetunedRun, choice: ImageChoice) -> None:
        """Refuse a classifier of other classes than the images have."""
        classes, count = choice.classes, run.config.downstream.classes
        other_names = run.classes is not None and choice.dataset.meta.classes not in (None, run.classes)
        if classes and (other_names or len(classes) > count):
            raise RefusedError(
                f"--run {run.directory}: tells {count} classes apart, {choice.dataset.directory} has {len(classes)}, "
                "or of other names; allowed: a run of the same classes"
            )

    @staticmethod
    def draw(
        runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
    ) -> list[Picture]:
        decisions = {name: _decisions(run, shown, environment) for name, run in runs.items()}
        path = output / "grad_cam.png"
        captions = [shown.choice.class_name(label) for label in shown.labels.tolist()]
        draw_activations(shown.images, captions, decisions, path)
        return [
            Picture(
                path,
                "Grad-CAM of the predicted class on the first norm of the last block; red: what speaks for it most, "
                "each image on its own scale; green words: predicted right",
            )
        ]


def _decisions(run: FinetunedRun, shown: ShownImages, environment: Environment) -> list[Decision]:
    """Return the run's decision on each image, preprocessed as for its metrics."""
    assert isinstance(run.config, ClassificationTaskConfig)
    model = ImageClassifier(run.config)
    predicting_engine(model, run, environment)
    model.eval()
    names, pixels, decisions = run.classes or shown.choice.classes, Pixels(), []
    labels = iter(shown.labels.tolist())
    for batch in measured_images(run.config, shown.choice):
        seen = batch["images"]  # [B, 3, S, S]
        maps, predicted = class_activation(model, pixels(seen.to(environment.device)))
        for image, map_, guess in zip(seen.float() / 255.0, maps.cpu(), predicted.tolist(), strict=True):
            word = names[guess] if names else str(guess)
            decisions.append(Decision(image=image, map=map_, prediction=word, right=guess == next(labels)))
    return decisions
