"""Semantic segmentation: fine-tuning on the class of each pixel (TRP 4.2.3 and Table 7, MLO-MAE B.6, AdPE 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.dense.maps import SegmentationMaps
from trp_scale.downstream.dense.rows import DenseData
from trp_scale.downstream.dense.segmentation_metrics import Confusion
from trp_scale.downstream.dense.segmentation_objective import Segmentation
from trp_scale.downstream.dense.settings import SegmentationTaskConfig
from trp_scale.downstream.dense.task import DenseTask
from trp_scale.downstream.whole_images import predict_whole


class SegmentationTask(DenseTask[SegmentationTaskConfig]):
    """Classes of pixels; see `DownstreamTask`."""

    metric = "mean_iou"
    maps = SegmentationMaps

    def __init__(self, config: SegmentationTaskConfig, environment: Environment) -> None:
        super().__init__(config, environment)
        self.objective = Segmentation(config.dense.auxiliary_weight)

    def complete(self, data: DenseData, measured: DenseData) -> int:
        assert isinstance(data.maps, SegmentationMaps) and isinstance(measured.maps, SegmentationMaps)
        if data.maps.all_classes != measured.maps.all_classes:
            raise RefusedError(
                f"--downstream.test_path {self.config.downstream.test_path} has other classes than --data.path "
                f"{self.config.data.path}; shard both with the same --semseg_classes"
            )
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
