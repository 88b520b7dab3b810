"""Settings of a run of pos_bert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trp_scale.config import MaskingConfig, PretrainConfig, TextModelConfig
from trp_scale.config.registry import Section, component, setting


@dataclass(kw_only=True)
class PosBertModelConfig(TextModelConfig):
    """Text encoder for pre-training."""

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.kind == "modern" and config.objective.next_sentence != "off":
            yield (
                f"--objective.next_sentence is {config.objective.next_sentence} but --model.kind is modern, which has "
                "no head for it; allowed: off"
            )


@dataclass(kw_only=True)
class PosBertObjectiveConfig(Section):
    """Losses, and the choice of those that are balanced (TRP 4.1)."""

    tasks: Literal["parts_of_speech", "sources", "parts_of_speech_by_sources"] = "parts_of_speech"
    """Tasks of word prediction: the nine groups of parts of speech, the members of the mixture in data.path, or the
    groups of each member."""
    other: Literal["outside", "exclude", "unmasked", "task"] = "outside"
    """Words outside the nine groups: outside = added with their natural share n_other / n, exclude = no loss,
    unmasked = never masked, task = a tenth balanced task."""
    next_sentence: Literal["outside", "inside", "off"] = "outside"
    """Next-sentence prediction: outside the balance with next_sentence_weight, inside it, or off."""
    next_sentence_weight: float = setting(1.0, at_least=0)
    """Weight of next-sentence prediction outside the balance."""
    output_bias: Literal["zero", "frequency"] = "zero"
    """Initial bias of the word prediction. frequency: the logarithm of each piece's share in the first training rows.
    Without it, a short run learns little else than these shares. --model.weights replaces this bias."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.tasks == "sources" and self.other in ("exclude", "task"):
            yield (
                f"--objective.other is {self.other} but --objective.tasks is sources, whose tasks have the words of "
                "all groups; allowed: --objective.other outside or unmasked, or --objective.tasks "
                "parts_of_speech_by_sources"
            )


@dataclass(kw_only=True)
class PosBertMaskingConfig(MaskingConfig):
    """Choice of the predicted pieces."""

    ratio: float = setting(0.15, above=0, below=1)
    """Share of the pieces of a row to predict (TRP 4.1.1)."""
    limit: int = setting(0, at_least=0)
    """Slots for masked positions per row; 0 = round(ratio x sequence length)."""
    maskings: int = setting(10, at_least=0)
    """Number of static maskings per row, used in turn by epoch (TRP 001, D.1: ten); 0 = a new masking each epoch."""
    unit: Literal["piece", "word"] = "piece"
    """Mask single word pieces, or whole words."""
    sampling: Literal["uniform", "stratified"] = "uniform"
    """stratified: systematic sampling over the groups, which reduces the variance of each group's count."""


@component("upstream", "pos_bert", "trp_scale.pretraining.pos_bert.upstream:TextUpstream")
@dataclass(kw_only=True)
class PosBertConfig(PretrainConfig):
    """Masked words in nine part-of-speech groups, and next-sentence prediction (TRP 4.1)."""

    model: PosBertModelConfig = field(default_factory=PosBertModelConfig)
    objective: PosBertObjectiveConfig = field(default_factory=PosBertObjectiveConfig)
    masking: PosBertMaskingConfig = field(default_factory=PosBertMaskingConfig)

    @property
    def reads(self) -> str:
        return "text"
