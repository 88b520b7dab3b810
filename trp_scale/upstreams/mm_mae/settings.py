"""Settings of a run of mm_mae."""

from __future__ import annotations

from dataclasses import dataclass

from trp_scale.config import PretrainConfig
from trp_scale.config.components import component


@component("upstream", "mm_mae", "trp_scale.upstreams.mm_mae.upstream:MultimodalUpstream")
@dataclass(kw_only=True)
class MmMaeConfig(PretrainConfig):
    """Masked patches of images with depth and segmentation, each modality a task (TRP 4.2)."""

    @property
    def reads(self) -> str:
        return "image"
