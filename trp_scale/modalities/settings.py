"""The package's modalities, in the order of a sample's members."""

from __future__ import annotations

from dataclasses import dataclass

from trp_scale.config.components import component
from trp_scale.config.settings import Settings


@component("modality", "rgb", "trp_scale.modalities.rgb:Rgb")
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
