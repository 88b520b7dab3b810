"""Accuracy of ImageNet classifiers on robustness sets: adversarial images, renditions, sketches and corruptions.

A set with fewer classes is measured by the accuracy among its classes, ImageNet-C by the mean corruption error
(Hendrycks and Dietterich 2019, section 4.2) over 15 corruptions of 5 severities.
"""

from __future__ import annotations

import copy
import logging
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.arguments import ROBUSTNESS_TITLES
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import Accuracy, ImageClassification, ImageClassifier, open_labelled
from trp_scale.finetuning.measurement import ReadRun, predict, predicting_engine
from trp_scale.reporting.results import SeedResult

logger = logging.getLogger(__name__)


def class_columns(model: tuple[str, ...], set_classes: tuple[str, ...] | None, where: Path) -> Tensor:
    """Return [k] int64: the model's class number of each class of a set, matched by name. Raises RefusedError for
    missing, unknown or ambiguous names.

    Args:
        model: class names of the model.
        set_classes: class names of the set.
        where: the set.
    """
    if set_classes is None:
        raise RefusedError(
            f"{where}: dataset.json has no class names to match with the model's; shard it from a folder with a "
            "sub-folder for each class, such as n01440764, or with --class_names"
        )
    number = {name: number_of_name for number_of_name, name in enumerate(model)}
    unknown = [name for name in set_classes if name not in number]
    if unknown:
        raise RefusedError(
            f"{where}: {len(unknown)} of its {len(set_classes)} classes ({', '.join(unknown[:3])}) are not among "
            "the model's "
            f"{len(model)} ({', '.join(model[:3])}, ...); shard both from folders with "
            "the same names, such as n01440764"
        )
    if set_classes == model:
        return torch.arange(len(set_classes))
    if several := [name for name, count in Counter(model).items() if count > 1 and name in set_classes]:
        raise RefusedError(
            f"{where}: the model has two classes named {several[0]}; fine-tune and shard with unique folder names, "
            "such as n01440764"
        )
    return torch.tensor([number[name] for name in set_classes])


ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""AlexNet's top-1 error by corruption of ImageNet-C, mean over severities: Table 1 of the paper, with the digits of
the authors' code."""

SEVERITIES = (1, 2, 3, 4, 5)
ALL_ERRORS = len(ALEXNET_ERRORS) * len(SEVERITIES)


IMAGENET = 1000
"""Number of classes of the reference classifier for corruption errors."""


class RobustClassifier:
    """Fine-tuned classifier to measure on robustness sets.

    Args:
        classes_of: data set with the names of the model's classes, if it was trained on numbered ones.
        micro_size: images per forward pass and rank; 0 = as in the run.

    Raises:
        RefusedError: a run of another task, or another number of names.
    """

    def __init__(self, run: ReadRun, environment: Environment, *, classes_of: str = "", micro_size: int = 0) -> None:
        config = run.config
        if not isinstance(config, ClassificationTaskConfig):
            raise RefusedError(
                f"--run {run.directory}: fine-tuned on {config.downstream.kind}; --robustness measures classifiers"
            )
        self.config = copy.deepcopy(config)
        self.config.batch.micro_size = micro_size or self.config.batch.micro_rows
        self.config.batch.global_size = self.config.batch.micro_rows * environment.data.size
        self.environment, self.seed = environment, run.config.training.seed
        self.classes = (open_labelled(config, classes_of).classes if classes_of else run.classes) or ()
        if len(self.classes) != run.config.downstream.classes:
            raise RefusedError(
                f"--classes {classes_of}: {len(self.classes)} classes found, the model has "
                f"{run.config.downstream.classes}; give the data set it was trained on"
            )
        self.engine = predicting_engine(ImageClassifier(config), run, environment)

    def accuracy(self, directory: Path, *, whole: bool = False) -> dict[str, Any]:
        """Return the accuracy on all images of a set, among its classes, and the counts. Collective. Raises DataError
        for a damaged set, RefusedError for classes that do not match.

        Args:
            whole: use whole images instead of the run's test transform.
        """
        config = copy.deepcopy(self.config)
        if whole:
            config.augmentation.measured = "whole"
        images = open_labelled(config, str(directory))
        columns = class_columns(self.classes, images.meta.classes, directory)
        metrics, group, classify = Accuracy(images.classes), self.environment.data, ImageClassification().logits

        def compute(forward: Callable[..., Tensor], batch: Batch) -> Tensor:
            """Return the logits of the set's classes, [R, k]."""
            return classify(forward, batch)[:, columns.to(batch["images"].device)]

        predict(self.engine, compute, images.batches(group), [metrics])
        figures = metrics.finish(group)
        count = sum(entry["images"] for entry in figures["detail"]["classes"].values())
        return {"accuracy": figures["accuracy"], "detail": {"images": count, "classes": len(columns)}}

    def measure(self, name: str, directory: Path, *, partial: bool) -> SeedResult:
        """Measure the set `name`. Collective. `partial`: whether ImageNet-C may be incomplete."""
        metrics = self.on_corruptions(directory, partial=partial) if name == "c" else self.accuracy(directory)
        metric = next(iter(metrics))
        return SeedResult(
            task=ROBUSTNESS_TITLES[name],
            metric=metric,
            split="test",
            lower_is_better=metric != "accuracy",
            seed=self.seed,
            detail=metrics.pop("detail"),
            metrics=metrics,
        )

    def on_corruptions(self, directory: Path, *, partial: bool) -> dict[str, Any]:
        """Return the mean corruption error, further errors and "detail". ImageNet-C's images are 224-pixel centre crops
        already, and published errors are of whole images."""
        present = {
            name: [level for level in SEVERITIES if (directory / name / str(level) / "dataset.json").is_file()]
            for name in ALEXNET_ERRORS
        }
        missing = [f"{name}/{level}" for name, levels in present.items() for level in SEVERITIES if level not in levels]
        if len(missing) == ALL_ERRORS:
            raise RefusedError(
                f"{directory}: no corruption has shards; expected: {directory}/CORRUPTION/SEVERITY/dataset.json, for "
                "example gaussian_noise/1 (trp-scale evaluate --help shows the command)"
            )
        if missing and not partial:
            raise RefusedError(
                f"{directory}: {len(missing)} of {ALL_ERRORS} are missing ({', '.join(missing[:4])}"
                f"{', ...' if len(missing) > 4 else ''}); shard them too, or use --partial for the mean over the others"
            )
        if len(self.classes) != IMAGENET:
            logger.warning(
                "%s: the model has %d classes; AlexNet's reference errors are for ImageNet's %d, so the mean "
                "corruption error is not comparable with published figures",
                directory,
                len(self.classes),
                IMAGENET,
            )
        errors = {
            name: {
                level: 1.0 - self.accuracy(directory / name / str(level), whole=True)["accuracy"] for level in levels
            }
            for name, levels in present.items()
            if levels
        }
        means = {name: statistics.fmean(levels.values()) for name, levels in errors.items()}
        # With all severities CE_c = sum_s E_{s,c} / sum_s E^AlexNet_{s,c}.
        relative = {name: mean / ALEXNET_ERRORS[name] for name, mean in means.items()}
        count = sum(map(len, errors.values()))
        label = "" if count == ALL_ERRORS else f" (partial: {count} of {ALL_ERRORS})"
        detail = {
            "errors": {name: {str(level): error for level, error in levels.items()} for name, levels in errors.items()},
            "corruption_errors": relative,
        }
        return {
            f"mean_corruption_error{label}": statistics.fmean(relative.values()),
            f"mean_error{label}": statistics.fmean(means.values()),
            **{f"error_{name}": value for name, value in means.items()},
            "detail": detail,
        }
