"""Every setting of a fine-tuning run: those of every run, and what only fine-tuning has."""

from __future__ import annotations

from dataclasses import dataclass, field

from trp_scale.config import Config, CropsConfig, RelativeVisionConfig, TextModelConfig
from trp_scale.config.augmentation import AugmentationConfig
from trp_scale.config.dense import DenseConfig
from trp_scale.config.detection import DetectionConfig
from trp_scale.config.downstream import DownstreamConfig


@dataclass(kw_only=True)
class FinetuneConfig(Config):
    """One fine-tuning run. `model` and `vision` describe the encoder: where --from gives one, they are its own."""

    model: TextModelConfig = field(default_factory=TextModelConfig)
    vision: RelativeVisionConfig = field(default_factory=RelativeVisionConfig)
    crops: CropsConfig = field(default_factory=CropsConfig)
    downstream: DownstreamConfig = field(default_factory=DownstreamConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    detection: DetectionConfig = field(default_factory=DetectionConfig)

    @property
    def reads(self) -> str:
        return "text" if self.downstream.kind == "glue" else "image"
