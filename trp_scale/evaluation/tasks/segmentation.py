"""Semantic segmentation: fine-tuning on the class of each pixel (TRP 4.2.3 and Table 7, MLO-MAE B.6, AdPE 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trp_scale.batch import Batch
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.data.images.dense_maps import SegmentationMaps
from trp_scale.data.images.dense_rows import DenseData
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.metrics.segmentation import Confusion
from trp_scale.evaluation.tasks.dense import DenseTask
from trp_scale.evaluation.whole_images import predict_whole
from trp_scale.objectives.segmentation import Segmentation


class SegmentationTask(DenseTask):
    """Classes of pixels; see `DownstreamTask`."""

    metric = "mean_iou"
    map_name = "semseg"

    def __init__(self, config: FinetuneConfig, environment: Environment) -> None:
        super().__init__(config, environment)
        self.objective = Segmentation(config.dense.auxiliary_weight)

    def complete(self, data: DenseData, measured: DenseData) -> int:
        assert isinstance(data.maps, SegmentationMaps)
        self.classes = data.maps.classes
        self.config.downstream.classes = len(self.classes)
        return len(self.classes)

    def predict(self, forward: Callable[..., list[Tensor]], batch: Batch) -> list[Tensor]:
        """The class of each pixel of each whole image, [H, W] int64."""
        return [logits.argmax(0) for logits in predict_whole(forward, self.objective.pixels, batch)]

    def metrics(self) -> Confusion:
        return Confusion(self.classes)

    def checkpoint_extra(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}
