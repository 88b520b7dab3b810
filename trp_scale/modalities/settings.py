"""The package's modalities, in the order of a sample's members, and the settings of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trp_scale.config.components import component
from trp_scale.config.settings import Settings, setting


@component("modality", "rgb", "trp_scale.modalities.rgb:Rgb", tasks=("rgb", "raw_rgb"))
@dataclass(kw_only=True)
class RgbSettings(Settings):
    """The image."""


@component("modality", "depth", "trp_scale.modalities.depth:Depth")
@dataclass(kw_only=True)
class DepthSettings(Settings):
    """The distance of every pixel, in metres or relative."""


@component("modality", "semseg", "trp_scale.modalities.semseg:Semseg")
@dataclass(kw_only=True)
class SemsegSettings(Settings):
    """The class of every pixel."""

    stride: int = setting(4, was="modalities.segmentation_stride")
    """Maps are read and predicted at 1/stride of the image's resolution; must divide vision.patch_size."""
    class_embedding: int = setting(64, was="modalities.class_embedding", at_least=1)
    """Width of the vector that each class enters with."""

    def problems(self, config: Any) -> Iterator[str]:
        patch_size = config.vision.patch_size
        if patch_size > 0 and (self.stride < 1 or patch_size % self.stride):
            near = [size for size in range(1, patch_size + 1) if patch_size % size == 0]
            yield (
                f"--semseg.stride is {self.stride} and does not divide --vision.patch_size {patch_size}; allowed: "
                f"{', '.join(map(str, near))}"
            )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if "semseg" not in config.modalities.inputs and self.class_embedding != SemsegSettings().class_embedding:
            yield (
                f"--semseg.class_embedding {self.class_embedding} has no effect with --modalities.inputs without semseg"
            )


@component("modality", "normals", "trp_scale.modalities.normals:Normals")
@dataclass(kw_only=True)
class NormalsSettings(Settings):
    """The direction that every pixel's surface faces."""

    loss: Literal["cosine", "l1"] = "cosine"
    """1 - cosine of the angle between predicted and true normal, or the mean absolute error of the three components."""
