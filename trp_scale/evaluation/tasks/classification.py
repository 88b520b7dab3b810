"""Image classification: fine-tuning of the whole encoder (He et al., A.1; TRP 001 Table 7; AdPE A)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from trp_scale.batch import Batch
from trp_scale.config import CropsConfig, RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.data.kinds import Rows, open_rows
from trp_scale.data.mixture import parse_paths
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.evaluation.encoder_source import SCRATCH, open_encoder
from trp_scale.evaluation.tasks.base import GatheredRows, TaskParts, open_task_sources, take_encoder
from trp_scale.models.image_classifier import ImageClassifier
from trp_scale.objectives.classification import ImageClassification


class ClassificationTask(TaskParts):
    """Classes of images; see `DownstreamTask`."""

    metric = "accuracy"

    def __init__(self, config: FinetuneConfig, environment: Environment) -> None:
        paths = parse_paths(config.data.path)
        train = open_images(config)
        measured = open_images(whole_images(config), config.downstream.test_path or config.data.path)
        config.downstream.classes = count_classes(train)
        test_path = config.downstream.test_path
        super().__init__(
            config,
            open_task_sources(
                config,
                environment,
                train,
                measured,
                train_paths=paths,
                measured_paths=parse_paths(test_path) if test_path else None,
            ),
        )
        self.name = config.downstream.task or "classification"
        self.objective = ImageClassification(config.downstream.classes)
        self.positions_per_step = config.batch.global_size * (config.crops.size // config.vision.patch_size) ** 2
        self.step_flops = 0.0

    def model(self) -> nn.Module:
        model = ImageClassifier(self.config)
        if (path := self.config.model.weights) and path != SCRATCH:
            take_encoder(model.encoder, open_encoder(path).image_weights(model.encoder.grid), path)
        return model

    def predict(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C] logits."""
        return self.objective.logits(forward, batch)

    def metrics(self) -> Accuracy:
        return Accuracy()


class Accuracy:
    """Share of the images whose class has the highest logit; see `Metrics`."""

    def __init__(self) -> None:
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        self._rows.add(batch, predicted=outputs.argmax(1), labels=batch["labels"])

    def finish(self, group: Group) -> dict[str, Any]:
        rows = self._rows.gather(group)
        return {"accuracy": float((rows["predicted"] == rows["labels"]).mean())}


def open_images(config: FinetuneConfig, path: str = "") -> Rows:
    """Shards of images with classes, at `path` or the run's own."""
    rows = open_rows(config, parse_paths(path or config.data.path))
    if "cls" not in rows.meta.suffixes:  # type: ignore[union-attr]
        raise RefusedError(f"{path or config.data.path}: the images have no classes; classification needs them")
    return rows


def count_classes(rows: Rows) -> int:
    """C: from the names, or the highest class there is."""
    names = rows.meta.classes  # type: ignore[union-attr]
    assert rows.labels is not None
    return len(names) if names is not None else 1 + max(int(labels.max()) for labels in rows.labels())


def whole_images(config: FinetuneConfig) -> FinetuneConfig:
    """The settings with each whole image, squashed to a square, in place of random crops."""
    config = copy.deepcopy(config)
    config.crops = replace(CropsConfig(size=config.crops.size, min_scale=1.0, max_scale=1.0, flip=0.0))
    return config
