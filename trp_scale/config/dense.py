"""Fine-tuning on a value for each pixel: segmentation and depth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DenseConfig:
    """Heads and augmentation of segmentation and depth."""
