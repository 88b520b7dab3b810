"""Segmentation and depth by fine-tuned runs, on the same images, side by side (TRP Figure 3)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.data.mixture import MemberPath
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.figures.drawing import DPI, Picture, draw_legend, show_image, small_axes
from trp_scale.evaluation.figures.features import ShownImages, planned_batches
from trp_scale.finetuning.dense.depth import DepthTask
from trp_scale.finetuning.dense.settings import DenseTaskConfig
from trp_scale.finetuning.dense.task import open_dense
from trp_scale.finetuning.finetuned_run import FinetunedRun, predicting_engine
from trp_scale.finetuning.task import build_task
from trp_scale.pretraining.modalities import modality


@dataclass(frozen=True, kw_only=True)
class PixelMaps:
    """Predictions of a run on each image.

    Attributes:
        kind: segmentation or depth.
        modality: whose colours its maps are shown in.
        images: [3, H, W] in [0, 1], at its stored size.
        predicted, true: [H, W] class numbers, VOID where there is none; or depth, NaN where it is unknown.
        relative: of depth: predictions have a scale of their own.
        classes: names of the classes of segmentation, by number.
    """

    kind: str
    modality: str
    images: list[Tensor]
    predicted: list[Tensor]
    true: list[Tensor]
    relative: bool
    classes: tuple[str, ...] = ()


def draw_pixel_maps(
    runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw segmentation.png or depth.png: a row for each image, with what each run predicts and the truth
    (evaluation/figures/represent.py: DrawRuns)."""
    maps = {name: predicted_maps(run, shown, environment) for name, run in runs.items()}
    first = next(iter(maps.values()))
    path = output / f"{first.kind}.png"
    _draw(maps, path)
    scale = "each run's on its own scale" if first.relative else "each image's on the scale of its true depth"
    what = "colours: classes, named below" if first.kind == "segmentation" else f"brighter: farther, {scale}"
    return [Picture(path, f"the image, what each run predicts, and the truth; {what}")]


@torch.no_grad()
def predicted_maps(run: FinetunedRun, shown: ShownImages, environment: Environment) -> PixelMaps:
    """Predict maps on the images; return them and the truth at the same size."""
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
    """Columns: image, runs, truth, as in the paper."""
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
