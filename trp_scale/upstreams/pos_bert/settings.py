"""Settings of a run of pos_bert."""

from __future__ import annotations

from dataclasses import dataclass

from trp_scale.config import PretrainConfig
from trp_scale.config.components import component


@component("upstream", "pos_bert", "trp_scale.upstreams.pos_bert.upstream:TextUpstream")
@dataclass(kw_only=True)
class PosBertConfig(PretrainConfig):
    """Words masked in nine part-of-speech groups, and sentences that follow each other (TRP 4.1)."""

    @property
    def reads(self) -> str:
        return "text"
