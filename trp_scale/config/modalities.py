"""Which modalities a multi-modal masked autoencoder sees and predicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class ModalitiesConfig:
    """MM-MAE's inputs and tasks (TRP 4.2.1). Defaults are the paper's."""

    inputs: list[Literal["rgb", "depth", "semseg"]] = field(default_factory=lambda: ["rgb", "depth", "semseg"])
    """Modalities whose patches the encoder may see."""
    outputs: list[Literal["rgb", "depth", "semseg", "raw_rgb"]] = field(
        default_factory=lambda: ["rgb", "depth", "semseg"]
    )
    """Modalities that are predicted. Each is a task with its own decoder. raw_rgb predicts pixels as they are; rgb
    normalises each patch first."""
    visible_tokens: int = 98
    """Patches of all inputs together that the encoder sees (TRP 001, Table 6)."""
    concentration: float = 1.0
    """Concentration of the symmetric Dirichlet distribution from which the inputs' shares of the visible patches are
    drawn; 1 = all shares are equally likely."""
    segmentation_stride: int = 4
    """Segmentation is read and predicted at 1/stride of the image's resolution; must divide vision.patch_size."""
    class_embedding: int = 64
    """Width of the vector that each segmentation class enters with."""
    encoder_norm: bool = False
    """A layer norm between the encoder and the decoders. MultiMAE has none; its decoders read the last block's output
    as it is."""
