"""How a classifier of ImageNet fares on other kinds of images: adversarially chosen, drawn, sketched, corrupted.

A set of 200 classes measures a classifier of 1000 by its accuracy among those 200; ImageNet-C by the mean corruption
error (Hendrycks and Dietterich 2019, section 4.2): errors under 15 corruptions of 5 severities.
"""

from __future__ import annotations

import copy
import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.evaluation.arguments import RobustnessSet
from trp_scale.evaluation.probe.images import open_probed
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.classification.task import ImageClassification, ImageClassifier, open_labelled
from trp_scale.finetuning.measurement import GatheredRows, PredictingEngine, ReadRun, predict, predicting_engine
from trp_scale.reporting.results import SeedResult

logger = logging.getLogger(__name__)


def class_columns(model: tuple[str, ...], set_classes: tuple[str, ...] | None, where: Path) -> Tensor:
    """[k] int64: the model's number of each class of a set, by name.

    Args:
        model: names of the model's classes.
        set_classes: of the set's.
        where: the set.

    Raises:
        RefusedError: the set's classes have no names, or the model does not know one of them, or has two of its name.
    """
    if set_classes is None:
        raise RefusedError(
            f"{where}: dataset.json names no classes, and they are matched with the model's by name; shard it from a "
            "folder with a sub-folder for each class, such as n01440764, or with --class_names"
        )
    number = {name: number_of_name for number_of_name, name in enumerate(model)}
    unknown = [name for name in set_classes if name not in number]
    if unknown:
        raise RefusedError(
            f"{where}: {len(unknown)} of its {len(set_classes)} classes ({', '.join(unknown[:3])}) are not among "
            "the model's "
            f"{len(model)} ({', '.join(model[:3])}, ...); the names of the folders that both were sharded from must be "
            "the same, such as n01440764"
        )
    if set_classes == model:
        return torch.arange(len(set_classes))
    if several := [name for name, count in Counter(model).items() if count > 1 and name in set_classes]:
        raise RefusedError(
            f"{where}: the model has two classes of the name {several[0]}, so that it is not known which one is meant; "
            "fine-tune and shard with the names of folders, such as n01440764"
        )
    return torch.tensor([number[name] for name in set_classes])


class SubsetAccuracy:
    """Share of the images whose class has the highest logit among the set's classes; see `Metrics`.

    Args:
        columns: [k] the model's number of each class of the set.
    """

    def __init__(self, columns: Tensor) -> None:
        self._columns = columns
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        among = outputs[:, self._columns.to(outputs.device)]  # [R, k]
        right = (among.argmax(1) == batch["labels"]) & among.isfinite().all(1)
        self._rows.add(batch, right=right)

    def finish(self, group: Group) -> dict[str, Any]:
        right = self._rows.gather(group)["right"]
        return {"accuracy": float(right.mean()), "detail": {"images": len(right), "classes": len(self._columns)}}


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
"""AlexNet's top-1 error under each corruption of ImageNet-C, the mean over severities: the paper's Table 1 with the
digits of the authors' code."""

SEVERITIES = (1, 2, 3, 4, 5)
ALL_ERRORS = len(ALEXNET_ERRORS) * len(SEVERITIES)

Errors = Mapping[str, Mapping[int, float]]
"""Top-1 error by corruption and severity, shares of 1."""


def corruption_errors(errors: Errors) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean error over severities by corruption, and that over AlexNet's mean over all five.

    With all severities the latter is CE_c = sum_s E_{s,c} / sum_s E^AlexNet_{s,c}; 1 is as bad as AlexNet.
    """
    means = {name: statistics.fmean(levels.values()) for name, levels in errors.items()}
    return means, {name: mean / ALEXNET_ERRORS[name] for name, mean in means.items()}


def check_complete(severities: Mapping[str, Sequence[int]], where: str, *, partial: bool) -> None:
    """Refuse a set in which corruptions or severities are missing.

    Args:
        severities: severities by corruption.
        where: its directory.
        partial: whether what is there is wanted all the same.

    Raises:
        RefusedError: something is missing and partial is False, or nothing is there.
    """
    missing = [
        f"{name}/{severity}"
        for name in ALEXNET_ERRORS
        for severity in SEVERITIES
        if severity not in severities.get(name, ())
    ]
    if len(missing) == ALL_ERRORS:
        raise RefusedError(
            f"{where}: no shards of a corruption are there; allowed: {where}/CORRUPTION/SEVERITY/dataset.json, for "
            f"example gaussian_noise/1 (trp-scale evaluate --help shows the command)"
        )
    if missing and not partial:
        raise RefusedError(
            f"{where}: {len(missing)} of {ALL_ERRORS} are missing ({', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}), and the mean corruption error is over all; shard them too, or "
            "take the mean of the others with --partial"
        )


IMAGENET = 1000
"""Classes of the classifier that corruption errors are divided by."""


class RobustClassifier:
    """A fine-tuned classifier that is shown other images, without further training.

    Args:
        run: a run of classification.
        environment: ranks and device.
        classes_of: data set with the names of its classes, where the checkpoint does not know them.
        micro_size: images of one forward pass on one rank; 0 = the run's.

    Raises:
        RefusedError: a run of another task, or nobody knows the names of its classes.
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
        self.classes = self._names(run, classes_of)
        self.engine: PredictingEngine = predicting_engine(ImageClassifier(config), run, environment)

    def _names(self, run: ReadRun, classes_of: str) -> tuple[str, ...]:
        names = open_labelled(classes_of).meta.classes if classes_of else run.classes
        if names is None:
            raise RefusedError(
                f"--run {run.directory}: its checkpoint does not know the names of its classes, and sets are matched "
                "by them; give the data set it was trained on (--classes DIR)"
            )
        if len(names) != run.config.downstream.classes:
            raise RefusedError(
                f"--classes {classes_of}: {len(names)} classes found, the model has {run.config.downstream.classes}; "
                "give the data set it was trained on"
            )
        return names

    def accuracy(self, directory: Path, *, whole: bool = False) -> dict[str, Any]:
        """Accuracy on all images of a set, among the set's own classes, and how many images these are. Collective.

        Args:
            whole: they are seen as they are, rather than as the run's own are measured.

        Raises:
            DataError: the set is missing or damaged.
            RefusedError: classes without names, or that the model does not know.
        """
        config = copy.deepcopy(self.config)
        if whole:
            config.augmentation.measured = "whole"
        images = open_probed(config, str(directory))
        columns = class_columns(self.classes, images.opened.meta.classes, directory)
        metrics, group = SubsetAccuracy(columns), self.environment.data
        predict(self.engine, ImageClassification().logits, images.batches(group), [metrics])
        return metrics.finish(group)

    def measure(self, images: RobustnessSet, *, partial: bool) -> SeedResult:
        """Measure one set. Collective.

        Args:
            partial: whether ImageNet-C may be some of its corruptions and severities alone.
        """
        if images.name == "c":
            return self.on_corruptions(images, partial=partial)
        accuracy = self.accuracy(images.directory)
        detail = accuracy.pop("detail")
        return self._result(images, "accuracy", accuracy, detail)

    def on_corruptions(self, images: RobustnessSet, *, partial: bool) -> SeedResult:
        """Mean corruption error. ImageNet-C's images are central squares of 224 pixels already, before the corruption:
        the errors that it is divided by, and published ones, are of the images as they are."""
        present = {
            name: [level for level in SEVERITIES if (images.directory / name / str(level) / "dataset.json").is_file()]
            for name in ALEXNET_ERRORS
        }
        check_complete(present, str(images.directory), partial=partial)
        if len(self.classes) != IMAGENET:
            logger.warning(
                "%s: the model has %d classes; the errors of AlexNet that the mean corruption error is divided by are "
                "of ImageNet's %d, so it is no published figure",
                images.directory,
                len(self.classes),
                IMAGENET,
            )
        errors = {
            name: {
                level: 1.0 - self.accuracy(images.directory / name / str(level), whole=True)["accuracy"]
                for level in levels
            }
            for name, levels in present.items()
            if levels
        }
        means, relative = corruption_errors(errors)
        count = sum(map(len, errors.values()))
        label = "" if count == ALL_ERRORS else f" (partial: {count} of {ALL_ERRORS})"
        metric = f"mean_corruption_error{label}"
        metrics = {
            metric: statistics.fmean(relative.values()),
            f"mean_error{label}": statistics.fmean(means.values()),
            **{f"error_{name}": value for name, value in means.items()},
        }
        detail = {
            "errors": {name: {str(level): error for level, error in levels.items()} for name, levels in errors.items()},
            "corruption_errors": relative,
        }
        return self._result(images, metric, metrics, detail)

    def _result(
        self, images: RobustnessSet, metric: str, metrics: dict[str, float], detail: dict[str, Any]
    ) -> SeedResult:
        return SeedResult(
            task=images.title,
            metric=metric,
            split="test",
            lower_is_better=metric != "accuracy",
            seed=self.seed,
            metrics=metrics,
            detail=detail,
        )
