"""Pictures of fine-tuned runs: Grad-CAM of classifiers (Selvaraju et al. 2017, eq. 1-2; MLO-MAE Figure 5), and
predicted maps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.data.mixture import MemberPath
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.figures.features import ShownImages, measured_images, planned_batches
from trp_scale.evaluation.figures.pictures import DPI, Picture, draw_legend, show_image, small_axes
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import ImageClassifier
from trp_scale.finetuning.dense.depth import DepthTask
from trp_scale.finetuning.dense.settings import DenseTaskConfig
from trp_scale.finetuning.dense.task import open_dense
from trp_scale.finetuning.measurement import ReadRun, predicting_engine
from trp_scale.finetuning.task import build_task
from trp_scale.models.patches import Pixels
from trp_scale.pretraining.modalities import modality


def grad_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Combine patch features [B, N, D] and gradients of a class logit to maps [B, G, G].

    The weight of a feature is its gradient averaged over patches (eq. 1); the value of a patch is the ReLU of the
    weighted sum of its features (eq. 2).
    """
    weights = gradients.mean(1, keepdim=True)  # [B, 1, D]
    values = F.relu((weights * activations).sum(-1))  # [B, N]
    grid = round(values.shape[1] ** 0.5)
    return values.reshape(-1, grid, grid)


def class_activation(model: ImageClassifier, images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Grad-CAM of the predicted class over the patches, on the first norm of the last block, as MLO-MAE does.

    Args:
        model: in evaluation mode.
        images: [B, 3, S, S] normalised.

    Returns:
        [B, G, G] maps, not negative and unscaled; [B] predicted classes.
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
    explained = logits.gather(1, predicted[:, None])  # [B, 1]
    # Images are independent in the model, so the gradient of the sum is that of each image.
    (gradients,) = torch.autograd.grad(explained.sum(), kept[0])  # [B, 1 + N, D]
    return grad_cam(kept[0].detach()[:, 1:], gradients[:, 1:]), predicted


class Decision(NamedTuple):
    """Decision of a classifier on one image.

    Attributes:
        image: [3, S, S] in [0, 1], as the classifier sees it.
        map: [G, G] Grad-CAM.
        prediction: class name.
    """

    image: Tensor
    map: Tensor
    prediction: str
    right: bool


def draw_activations(
    images: Tensor, captions: Sequence[str], decisions: Mapping[str, Sequence[Decision]], path: Path
) -> None:
    """Draw a column per image and a row per run.

    Args:
        images: [R, 3, S, S] in [0, 1].
        captions: classes of the images.
        decisions: by run, one per image.
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
    runs: Mapping[str, ReadRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw grad_cam.png of classifiers (evaluation/figures/represent.py: DrawRuns)."""
    decisions = {name: _decisions(run, shown, environment) for name, run in runs.items()}
    path = output / "grad_cam.png"
    captions = [shown.choice.class_name(label) for label in shown.labels.tolist()]
    draw_activations(shown.images, captions, decisions, path)
    return [
        Picture(
            path,
            "Grad-CAM of the predicted class on the first norm of the last block; red: strongest evidence, scaled by "
            "image; green text: correct",
        )
    ]


def _decisions(run: ReadRun, shown: ShownImages, environment: Environment) -> list[Decision]:
    """Return the run's decision on each image, with its test transform."""
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


@dataclass(frozen=True, kw_only=True)
class PixelMaps:
    """Predictions of a run on each image.

    Attributes:
        kind: segmentation or depth.
        modality: sets the colours.
        images: [3, H, W] in [0, 1], at the stored size.
        predicted, true: [H, W] class numbers, VOID if unknown; or depth, NaN if unknown.
        relative: whether predicted depth has its own scale.
        classes: class names of segmentation.
    """

    kind: str
    modality: str
    images: list[Tensor]
    predicted: list[Tensor]
    true: list[Tensor]
    relative: bool
    classes: tuple[str, ...] = ()


def draw_pixel_maps(
    runs: Mapping[str, ReadRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw segmentation.png or depth.png (evaluation/figures/represent.py: DrawRuns)."""
    maps = {name: predicted_maps(run, shown, environment) for name, run in runs.items()}
    first = next(iter(maps.values()))
    path = output / f"{first.kind}.png"
    _draw(maps, path)
    scale = "scaled by run" if first.relative else "scaled by the image's true depth"
    what = "colours: classes, named below" if first.kind == "segmentation" else f"brighter: farther, {scale}"
    return [Picture(path, f"image, prediction of each run, and truth; {what}")]


@torch.no_grad()
def predicted_maps(run: ReadRun, shown: ShownImages, environment: Environment) -> PixelMaps:
    """Return predicted and true maps of the images."""
    config = copy.deepcopy(run.config)
    assert isinstance(config, DenseTaskConfig)
    data = shown.choice.dataset.directory
    config.data.path = config.downstream.test_path = str(data)
    config.data.workers = 0
    task: Any = build_task(config, environment)
    task.sources.close()
    engine = predicting_engine(task.model(), run, environment)
    engine.train(False)
    paths = [MemberPath(name="", weight=Fraction(1), path=data)]
    builder = open_dense(config, paths, task.maps).rows(config, whole=True).builder
    images: list[Tensor] = []
    predicted: list[Tensor] = []
    true: list[Tensor] = []
    for batch in planned_batches(builder, shown.choice):
        predicted += [map_.cpu() for map_ in task.predict(engine, batch.to(environment.device))]
        wholes = zip(batch["images"], batch[f"whole_{task.maps.name}"], batch["sizes"].tolist(), strict=True)
        for image, whole, (height, width) in wholes:
            images.append(F.interpolate(image[None].float() / 255.0, size=(height, width), mode="bilinear")[0])
            true.append(whole[:height, :width])
    if isinstance(task, DepthTask):
        predicted = [task.space.depth(map_) for map_ in predicted]
        true = [torch.where(map_ > 0, map_, torch.nan) for map_ in true]
    relative = isinstance(task, DepthTask) and task.config.dense.alignment != "none"
    return PixelMaps(
        kind=config.downstream.kind,
        modality=task.maps.name,
        images=images,
        predicted=predicted,
        true=true,
        relative=relative,
        classes=getattr(task.maps, "classes", ()),
    )


def _draw(maps: Mapping[str, PixelMaps], path: Path) -> None:
    """Draw the columns image, runs, truth, as in the paper."""
    first = next(iter(maps.values()))
    axes, figure = small_axes(len(first.images), 2 + len(maps), side=1.6)
    for title, panel in zip(("image", *maps, "truth"), axes[0], strict=True):
        panel.set_title(title, fontsize=9)
    kind = modality(first.modality)
    show = kind.show
    for row, (image, true) in enumerate(zip(first.images, first.true, strict=True)):
        show_image(axes[row, 0], image)
        for panel, of_run in zip(axes[row, 1:-1], maps.values(), strict=True):
            prediction = of_run.predicted[row]
            show(panel, prediction, prediction if of_run.relative else true)
        show(axes[row, -1], true, true)
    maps_shown = [*first.true, *(prediction for of_run in maps.values() for prediction in of_run.predicted)]
    draw_legend(figure, kind.legend(maps_shown, first.classes))
    figure.savefig(path, dpi=DPI)
