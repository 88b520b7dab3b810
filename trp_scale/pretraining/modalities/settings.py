"""Modalities of the package in the order of a sample's members, and their settings for runs, for maps from files
(shard-images), and for labels by models (pseudo-label)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trp_scale.config.registry import Section, Settings, component, setting


@dataclass(kw_only=True)
class LabelSettings(Section):
    """Labels of a modality from a model."""

    model: str = ""
    """A directory written by save_pretrained, or a name on the Hugging Face hub. Only safetensors weights are read, and
    no code of the model is run. Empty = no labels of this modality."""
    directory: str = ""
    """Directory of the maps in the data set; empty = the modality's name. Each model needs its own directory."""


@component("modality", "rgb", "trp_scale.pretraining.modalities.rgb:Rgb", tasks=("rgb", "raw_rgb"))
@dataclass(kw_only=True)
class RgbSettings(Settings):
    """The image."""


@dataclass(kw_only=True)
class DepthFileSettings(Section):
    """Meaning of the numbers in depth maps from files."""

    scale: float | None = setting(None, above=0)
    """Metres per stored unit, in 16 bits (0.001: millimetres, up to 65.5 m). 16-bit PNG and integer .npy are in these
    units; float .npy is in metres. None = relative depth of unknown unit."""
    relative: bool = False
    """Maps of 8 bits and float .npy have no unit: the range of each map is stored as 1 to 65535. Without this, 8 bits
    are an error, and so are floats without --depth.scale. In all maps, 0 and values that are not finite mean not
    measured."""
    larger_is: Literal["farther", "nearer"] = "farther"
    """Meaning of a larger number; nearer = inverse depth, or images of depth with bright near parts."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.scale is not None and self.relative:
            yield f"--depth.relative: not with --depth.scale {self.scale:g}; allowed: one of the two"
        if self.scale is not None and self.larger_is == "nearer":
            yield "--depth.larger_is nearer: not with --depth.scale, whose metres grow with distance"


@dataclass(kw_only=True)
class DepthLabelSettings(LabelSettings):
    """A depth estimator (--depth.model), and the meaning of its output."""

    model: str = setting("")
    """Depth estimator of transformers (DPT, Depth Anything and others): a directory written by save_pretrained, or a
    name on the Hugging Face hub. Only safetensors weights are read, and no code of the model is run."""
    scale: float | None = setting(None, above=0)
    """Metres per unit of the stored 16-bit depth (0.001: up to 65 m), for a model with output in metres. Without this,
    each image's output is stretched to 1..65535."""
    larger_is: Literal["auto", "nearer", "farther"] = setting("auto")
    """Meaning of a larger output; auto = farther if it is in metres by --depth.scale or the model's configuration, else
    nearer (DPT and Depth Anything estimate inverse depth)."""
    directory: str = setting("")
    """Directory of the maps in the data set; empty = depth. Each model needs its own directory."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.scale is not None and self.larger_is == "nearer":
            yield "--depth.larger_is nearer: not with --depth.scale, whose metres grow with distance"


@component(
    "modality",
    "depth",
    "trp_scale.pretraining.modalities.depth:Depth",
    files=DepthFileSettings,
    labels=DepthLabelSettings,
)
@dataclass(kw_only=True)
class DepthSettings(Settings):
    """Distance of every pixel, in metres or relative."""


@dataclass(kw_only=True)
class SemsegFileSettings(Section):
    """Meaning of the numbers in segmentation maps from files."""

    classes: Path | None = setting(None)
    """Text file with one class name per line, from number 0 on; required for segmentation maps."""
    void_label: int = setting(255, at_least=0, at_most=255)
    """Number of pixels without a class; stored as 255."""


@dataclass(kw_only=True)
class SemsegLabelSettings(LabelSettings):
    """A model for semantic or panoptic segmentation (--semseg.model)."""

    model: str = setting("")
    """Model for semantic or panoptic segmentation (Mask2Former, SegFormer, UPerNet and others): a directory or a name,
    as in --depth.model. Its classes, at most 255, become those of the data set. Do not use models for instance
    segmentation (such as ...-coco-instance): they label sky, walls and ground as objects."""
    directory: str = setting("")
    """Directory of the maps in the data set; empty = semseg. Each model needs its own directory."""


@component(
    "modality",
    "semseg",
    "trp_scale.pretraining.modalities.semseg:Semseg",
    files=SemsegFileSettings,
    labels=SemsegLabelSettings,
)
@dataclass(kw_only=True)
class SemsegSettings(Settings):
    """Class of every pixel."""

    stride: int = setting(4)
    """Maps are read and predicted at 1/stride of the image's resolution; must divide vision.patch_size."""
    class_embedding: int = setting(64, at_least=1)
    """Width of the class embeddings at the input."""

    def problems(self, config: Any) -> Iterator[str]:
        patch_size = config.vision.patch_size
        if patch_size > 0 and (self.stride < 1 or patch_size % self.stride):
            near = [size for size in range(1, patch_size + 1) if patch_size % size == 0]
            yield (
                f"--semseg.stride is {self.stride}, which does not divide --vision.patch_size {patch_size}; allowed: "
                f"{', '.join(map(str, near))}"
            )

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if "semseg" not in config.modalities.inputs and self.class_embedding != SemsegSettings().class_embedding:
            yield (
                f"--semseg.class_embedding {self.class_embedding} has no effect with --modalities.inputs without semseg"
            )


@component("modality", "normals", "trp_scale.pretraining.modalities.normals:Normals")
@dataclass(kw_only=True)
class NormalsSettings(Settings):
    """Surface normal of every pixel."""

    loss: Literal["cosine", "l1"] = "cosine"
    """cosine = 1 - cosine of the angle between predicted and true normal; l1 = mean absolute error of components."""
