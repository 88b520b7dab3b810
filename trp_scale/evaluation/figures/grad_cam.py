"""Evidence for the decisions of fine-tuned classifiers, side by side.

Grad-CAM: Selvaraju et al. 2017, eq. 1-2; MLO-MAE Figure 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.figures.drawing import DPI, Picture, show_image, small_axes
from trp_scale.evaluation.figures.features import ShownImages, measured_images
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


class Decision(NamedTuple):
    """Decision of a classifier on one image.

    Attributes:
        image: [3, S, S] in [0, 1], as it sees it.
        map: [G, G] zero or more, where it looks.
        prediction: in words.
        right: whether it is.
    """

    image: Tensor
    map: Tensor
    prediction: str
    right: bool


def draw_activations(
    images: Tensor, captions: Sequence[str], decisions: Mapping[str, Sequence[Decision]], path: Path
) -> None:
    """A column for each image; a row of what each run decides by.

    Args:
        images: [R, 3, S, S] in [0, 1].
        captions: the class of each.
        decisions: of each run, on each image.
    """
    axes, figure = small_axes(1 + len(decisions), len(images), side=1.35)
    for column, (image, caption) in enumerate(zip(images, captions, strict=True)):
        show_image(axes[0, column], image)
        axes[0, column].set_title(caption, fontsize=8)
    for row, (name, row_decisions) in enumerate(decisions.items(), start=1):
        axes[row, 0].set_ylabel(name, fontsize=8)
        for column, picture in enumerate(row_decisions):
            show_image(axes[row, column], picture.image)
            largest = float(picture.map.max())
            scaled = picture.map / largest if largest > 0 else picture.map
            smooth = F.interpolate(scaled[None, None], size=picture.image.shape[-2:], mode="bilinear")[0, 0]
            axes[row, column].imshow(smooth.numpy(), cmap="jet", vmin=0, vmax=1, alpha=0.5)
            axes[row, column].set_title(
                picture.prediction, fontsize=8, color="tab:green" if picture.right else "tab:red"
            )
    figure.savefig(path, dpi=DPI)


def draw_classifiers(
    runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw grad_cam.png of classifiers (evaluation/figures/represent.py: DrawRuns)."""
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
