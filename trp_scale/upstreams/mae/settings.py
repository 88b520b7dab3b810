"""Settings of a run of mae."""

from __future__ import annotations

from dataclasses import dataclass

from trp_scale.config import PretrainConfig
from trp_scale.config.components import component


@component("upstream", "mae", "trp_scale.upstreams.mae.upstream:ImageUpstream")
@dataclass(kw_only=True)
class MaeConfig(PretrainConfig):
    """Masked patches of images (MAE; MAE+ and AdPE 3, 4)."""

    @property
    def reads(self) -> str:
        return "image"
