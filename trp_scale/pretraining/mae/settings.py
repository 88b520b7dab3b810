"""Settings of a run of mae."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.config.registry import component, setting
from trp_scale.methods.learned_masks.settings import HeadSettings, LabelledSettings


@dataclass(kw_only=True)
class MaeObjectiveConfig:
    """Prediction target of a masked patch, and the tasks."""

    tasks: Literal["reconstruction", "sources"] = "reconstruction"
    """One task, or a task for each member of the mixture in data.path."""
    target: Literal["normalised", "pixels"] = "normalised"
    """normalised = pixels normalised by each patch's mean and deviation (He et al.); pixels = without this."""
    uniformity: float = setting(0.0, at_least=0)
    """Weight of U-MAE's uniformity loss: the mean squared cosine between class tokens, over all pairs of the global
    batch (Zhang et al. 2022). 0 = off; U-MAE uses 0.01."""


@component("upstream", "mae", "trp_scale.pretraining.mae.upstream:ImageUpstream")
@dataclass(kw_only=True)
class MaeConfig(MaskedAutoencoderConfig):
    """Masked patches of images (MAE; MAE+ and AdPE 3, 4)."""

    objective: MaeObjectiveConfig = field(default_factory=MaeObjectiveConfig)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        masks, uniformity = self.multilevel, self.objective.uniformity
        if not uniformity or not isinstance(masks, LabelledSettings):
            return
        if masks.selection != "hard":
            yield (
                f"--multilevel.selection is {masks.selection} but --objective.uniformity is {uniformity:g}, which has "
                "no derivative by the choice of patches; allowed: --multilevel.selection hard, or "
                "--objective.uniformity 0"
            )
        if isinstance(masks, HeadSettings) and masks.mode == "look_ahead":
            yield (
                f"--multilevel.mode is look_ahead but --objective.uniformity is {uniformity:g}, which needs a separate "
                "pass over the global batch; allowed: --multilevel.mode committed, or --objective.uniformity 0"
            )
