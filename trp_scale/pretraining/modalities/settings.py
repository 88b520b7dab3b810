"""The package's modalities, in the order of a sample's members, and the settings of each: of runs, of its maps from
files (shard-images), and of its labels by models (pseudo-label)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trp_scale.config.registry import component
from trp_scale.config.settings import Section, Settings, setting


@dataclass(kw_only=True)
class LabelSettings(Section):
    """How a model labels images with a modality."""

    model: str = ""
    """A directory that save_pretrained wrote, or a name on the Hugging Face hub. Weights are read from safetensors
    alone, and no code of theirs is run. Empty = no labels of this modality."""
    directory: str = ""
    """Directory of the maps within the data set; empty = the modality's name. Another model needs another one."""


@component("modality", "rgb", "trp_scale.pretraining.modalities.rgb:Rgb", tasks=("rgb", "raw_rgb"))
@dataclass(kw_only=True)
class RgbSettings(Settings):
    """The image."""


@dataclass(kw_only=True)
class DepthFileSettings(Section):
    """Meaning of the numbers in depth maps from files."""

    scale: float | None = setting(None, above=0)
    """Metres per unit of what is stored, in 16 bits (0.001: millimetres, up to 65.5 m). PNG of 16 bits and .npy of
    whole numbers are in these units; .npy of floats are metres. None = relative depth, of an unknown unit."""
    relative: bool = False
    """Maps of 8 bits and .npy of floats have no unit: each one's smallest to largest number is stored as 1 to 65535.
    Without it they are refused unless floats are metres: 256 steps are a picture of depth, not metres. In all maps
    0, and what is not finite, means that nothing was measured there."""
    larger_is: Literal["farther", "nearer"] = "farther"
    """What a larger number means; nearer: inverse depth, or a picture of depth whose near parts are bright."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.scale is not None and self.relative:
            yield f"--depth.relative: not with --depth.scale {self.scale:g}; allowed: one of the two"
        if self.scale is not None and self.larger_is == "nearer":
            yield "--depth.larger_is nearer: not with --depth.scale, whose metres grow with distance"


@dataclass(kw_only=True)
class DepthLabelSettings(LabelSettings):
    """A depth estimator (--depth.model), and what its output means."""

    model: str = setting("")
    """Depth estimator (DPT and Depth Anything, and others that transformers has): a directory that save_pretrained
    wrote, or a name on the Hugging Face hub. Weights are read from safetensors alone, and no code of theirs is run."""
    scale: float | None = setting(None, above=0)
    """Metres per unit of the stored 16-bit depth (0.001: up to 65 m), for a model whose output is in metres. Without it
    each image's output is stretched to 1..65535."""
    larger_is: Literal["auto", "nearer", "farther"] = setting("auto")
    """What a larger output means; auto: farther if it is in metres by --depth.scale or by the model's configuration,
    else nearer (DPT and Depth Anything estimate inverse depth)."""
    directory: str = setting("")
    """Directory of the maps within the data set; empty = depth. Another model needs another one."""

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
    """The distance of every pixel, in metres or relative."""


@dataclass(kw_only=True)
class SemsegFileSettings(Section):
    """Meaning of the numbers in segmentation maps from files."""

    classes: Path | None = setting(None)
    """Text file with the name of each class, one a line from number 0 on; needed with such maps."""
    void_label: int = setting(255, at_least=0, at_most=255)
    """Number that means no class; stored as 255."""


@dataclass(kw_only=True)
class SemsegLabelSettings(LabelSettings):
    """A model for semantic or panoptic segmentation (--semseg.model)."""

    model: str = setting("")
    """Model for semantic or panoptic segmentation (Mask2Former, SegFormer, UPerNet and others), given as --depth.model
    is. Its classes, at most 255, become the data set's. A model for instances (such as ...-coco-instance) is no
    choice: it knows things only, and would call sky, walls and ground a thing."""
    directory: str = setting("")
    """Directory of the maps within the data set; empty = semseg. Another model needs another one."""


@component(
    "modality",
    "semseg",
    "trp_scale.pretraining.modalities.semseg:Semseg",
    files=SemsegFileSettings,
    labels=SemsegLabelSettings,
)
@dataclass(kw_only=True)
class SemsegSettings(Settings):
    """The class of every pixel."""

    stride: int = setting(4)
    """Maps are read and predicted at 1/stride of the image's resolution; must divide vision.patch_size."""
    class_embedding: int = setting(64, at_least=1)
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


@component("modality", "normals", "trp_scale.pretraining.modalities.normals:Normals")
@dataclass(kw_only=True)
class NormalsSettings(Settings):
    """The direction that every pixel's surface faces."""

    loss: Literal["cosine", "l1"] = "cosine"
    """1 - cosine of the angle between predicted and true normal, or the mean absolute error of the three components."""
