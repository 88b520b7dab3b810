"""Settings of a run of pos_bert."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trp_scale.config import MaskingConfig, PretrainConfig, TextModelConfig
from trp_scale.config.registry import component
from trp_scale.config.settings import setting


@dataclass(kw_only=True)
class PosBertObjectiveConfig:
    """Losses, and which of them take part in the maximum (TRP 4.1)."""

    other: Literal["outside", "exclude", "unmasked", "task"] = "outside"
    """Words outside the nine groups: outside = added with their natural share n_other / n, exclude = no loss,
    unmasked = never chosen for masking, task = a tenth task in the maximum."""
    next_sentence: Literal["outside", "inside", "off"] = "outside"
    """Next-sentence prediction: outside the maximum with next_sentence_weight, inside it, or off."""
    next_sentence_weight: float = setting(1.0, at_least=0)
    """Weight of next-sentence prediction when it is outside the maximum."""
    output_bias: Literal["zero", "frequency"] = "zero"
    """First value of the word prediction's bias. frequency: the logarithm of each piece's share of the first training
    rows. A short run otherwise learns little but these shares, and gives nearly the same output for all words.
    --model.weights brings a bias of its own."""


@dataclass(kw_only=True)
class PosBertMaskingConfig(MaskingConfig):
    """Choice of the predicted pieces of a row."""

    ratio: float = setting(0.15, above=0, below=1)
    """Share of the pieces of a row that are predicted (TRP 4.1.1)."""
    limit: int = setting(0, at_least=0)
    """Masked positions a row is padded to; 0 = round(ratio x sequence length)."""
    maskings: int = setting(10, at_least=0)
    """Different maskings per row, used in turn by epoch (TRP 001, D.1: ten); 0 = a fresh one each epoch."""
    unit: Literal["piece", "word"] = "piece"
    """Draw single word pieces, or whole words."""
    sampling: Literal["uniform", "stratified"] = "uniform"
    """stratified: positions are drawn systematically over the groups; each group's count then varies less."""


@component("upstream", "pos_bert", "trp_scale.pretraining.pos_bert.upstream:TextUpstream")
@dataclass(kw_only=True)
class PosBertConfig(PretrainConfig):
    """Words masked in nine part-of-speech groups, and sentences that follow each other (TRP 4.1)."""

    model: TextModelConfig = field(default_factory=TextModelConfig)
    objective: PosBertObjectiveConfig = field(default_factory=PosBertObjectiveConfig)
    masking: PosBertMaskingConfig = field(default_factory=PosBertMaskingConfig)

    @property
    def reads(self) -> str:
        return "text"
