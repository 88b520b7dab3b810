"""Detection: boxes and masks of objects (AdPE 5.2; MLO-MAE 3.5.2 and D.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.core.batch import Batch
from trp_scale.data.mixture import parse_paths
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.arguments import SCRATCH
from trp_scale.downstream.detection.metrics import VOC_METRIC, DetectionMetrics
from trp_scale.downstream.detection.model import Detector, Target
from trp_scale.downstream.detection.objective import Detection
from trp_scale.downstream.detection.rows import detection_rows, learned, open_detection, settle_masks, training_notices
from trp_scale.downstream.encoder_source import open_encoder
from trp_scale.downstream.task import TaskParts, open_task_sources, take_encoder


class DetectionTask(TaskParts):
    """Boxes, and masks where there are any; see `DownstreamTask`. Of COCO's files the metric is COCO's AP of boxes, of
    Pascal VOC's that of VOC 2007."""

    objective: Detection

    def __init__(self, config: FinetuneConfig, environment: Environment) -> None:
        detection, test_path = config.detection, config.downstream.test_path
        paths, masks = parse_paths(config.data.path), detection.masks != "off"
        train = measured = open_detection(paths, detection.images, masks=masks)
        if test_path:
            measured = open_detection(parse_paths(test_path), detection.test_images, masks=masks)
            measured = [one.with_classes(train[0].classes) for one in measured]
        settle_masks(config, [*train, *measured])
        masks = detection.masks == "on"
        config.downstream.classes = len(train[0].classes)
        sources = open_task_sources(
            config,
            environment,
            detection_rows(config, train, augment=True),
            detection_rows(config, measured, augment=False),
            train_paths=paths,
            measured_paths=parse_paths(test_path) if test_path else None,
            learned=learned(config, train),
        )
        sources.notices += training_notices(config, train)
        sources.notices += [notice for one in measured if test_path for notice in one.notices()]
        super().__init__(config, sources)
        self._measured = measured
        self.name = config.downstream.task or "detection"
        self.metric = VOC_METRIC if measured[0].voc else "AP"
        self.objective = Detection(masks=masks)
        self.positions_per_step = config.batch.global_size * (config.crops.size // config.vision.patch_size) ** 2
        self.step_flops = 0.0

    def model(self) -> nn.Module:
        model = Detector(self.config)
        if (path := self.config.model.weights) and path != SCRATCH:
            take_encoder(model.encoder, open_encoder(path).image_weights(model.encoder.grid), path)
        return model

    def predict(self, forward: Callable[..., Any], batch: Batch) -> list[Target]:
        """Detections of each row, in pixels of its square."""
        return self.objective.detections(forward, batch)

    def metrics(self) -> DetectionMetrics:
        return DetectionMetrics(self._measured)
