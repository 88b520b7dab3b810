"""How images are changed while a classifier learns from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class AugmentationConfig:
    """Augmentation of training images and of their classes. Defaults are none."""
