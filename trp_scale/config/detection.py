"""Fine-tuning on boxes and masks of objects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DetectionConfig:
    """Mask R-CNN on a vision transformer."""
