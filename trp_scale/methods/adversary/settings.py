"""Settings of the adversary (AdPE 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trp_scale.config.images import ImagePretrainConfig, MaskedAutoencoderConfig
from trp_scale.config.registry import MetricPlot, Settings, component, describe_metrics, setting


@component("adversary", "none", "trp_scale.methods.adversary.positions:no_adversary")
@dataclass(kw_only=True)
class NoAdversarySettings(Settings):
    """No adversary."""


@dataclass(kw_only=True)
class AdversarySettings(Settings):
    """Settings of all adversaries."""

    norm: Literal["l2", "linf"] = "linf"
    """Norm of the ball that bounds perturbations."""
    eps: float = setting(20.0, above=0)
    """Radius of the ball, in units of the embedding, in patches (coordinates), or of pixels in [0, 1]."""


@dataclass(kw_only=True)
class PositionAdversarySettings(AdversarySettings):
    """Settings of adversaries that perturb the positions of masked patches."""

    ascent: Literal["adamw", "sgd", "sign", "linear"] = "adamw"
    """adamw: AdamW without decay, at the learning rate of the weights or at `lr`. sgd, sign: at `lr`. linear: the
    one-step rule from zero, eps g / ||g|| or eps sign(g) (footnote 2); needs update = sequential."""
    lr: float = setting(0.0, at_least=0)
    """Step size in units of eps. adamw: peak value, on the schedule of the weights; 0 = the learning rate of the
    weights, which then bounds each step. sgd, sign: constant; required."""
    update: Literal["parallel", "sequential"] = "parallel"
    """parallel: the backward pass that trains the weights also gives the adversary's gradient. sequential: a separate
    pass gives it, then the weights see the new perturbation (twice the cost)."""
    where: Literal["encoder", "both"] = "encoder"
    """Blocks that see perturbed positions: encoder only, or encoder and decoder. In the authors' code and the recipes
    of Table A.2, absolute adversaries act in the encoder, relative ones in both."""
    check_every: int = setting(100, at_least=0)
    """Steps between checks that all ranks hold the same perturbation; 0 = never."""

    def problems(self, config: ImagePretrainConfig) -> Iterator[str]:
        if isinstance(config, MaskedAutoencoderConfig):
            yield from self._model(config)
        else:
            yield (
                f"--adversary.kind is {self.kind} but the encoder of --upstream {config.upstream} sees no masked "
                "patches; allowed: --adversary.kind pixels or none, or --upstream mae"
            )
        yield from self._ascent()

    def _model(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        vision = config.vision
        if vision.tokens == "visible":
            yield (
                f"--adversary.kind is {self.kind} but --vision.tokens is visible: the encoder sees no masked patches; "
                "allowed: --vision.tokens all, as in the recipe mae_plus_vit_b"
            )
        if self.kind.startswith("relative") and vision.positions != "relative":
            yield (
                f"--adversary.kind is {self.kind} but --vision.positions is {vision.positions}; allowed: "
                "--vision.positions relative, or an absolute kind"
            )
        if self.where == "both" and vision.decoder == "linear":
            yield (
                "--adversary.where is both but --vision.decoder linear has no positions; allowed: "
                "--adversary.where encoder, or --vision.decoder transformer"
            )

    def _ascent(self) -> Iterator[str]:
        if self.ascent in ("sgd", "sign") and self.lr == 0:
            yield (
                f"--adversary.ascent is {self.ascent} but --adversary.lr is not set; allowed: a step size in units of "
                "--adversary.eps, or --adversary.ascent adamw"
            )
        if self.ascent == "linear" and self.lr > 0:
            yield (
                f"--adversary.lr is {self.lr:g} but --adversary.ascent linear moves to the edge of the ball in one "
                "step; allowed: --adversary.lr 0, or --adversary.ascent adamw, sgd or sign"
            )
        if self.ascent == "linear" and self.update == "parallel":
            yield (
                "--adversary.ascent linear needs the gradient at zero, but --adversary.update is parallel; "
                "allowed: --adversary.update sequential"
            )


@component("adversary", "absolute_embedding", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class AbsoluteEmbeddingSettings(PositionAdversarySettings):
    """Add a vector to the position embedding of masked patches (AdPE 4.1.1)."""

    mask_token: Literal["frozen", "learned"] = "frozen"
    """A learned mask token can cancel the perturbation, because both are added to the same tokens."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.mask_token == "learned":
            yield (
                "--adversary.mask_token learned can cancel the perturbation, because both are added to the same "
                "tokens; frozen cannot"
            )


@component("adversary", "absolute_coordinate", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class AbsoluteCoordinateSettings(PositionAdversarySettings):
    """Shift masked patches on the grid (AdPE 4.1.2)."""


@component("adversary", "relative_embedding", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class RelativeEmbeddingSettings(PositionAdversarySettings):
    """Add vectors to the relative table for masked queries (AdPE 4.2.2)."""

    scope: Literal["per_bucket", "value", "shared"] = "per_bucket"
    """One vector per bucket of the table, one on the values, or one for all buckets (as printed in 4.2.2; it cancels in
    the softmax and has no effect)."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.scope == "shared":
            yield (
                "--adversary.scope shared adds one vector to every bucket, which cancels in the softmax: it has no "
                "effect (AdPE 4.2.2 as printed); use per_bucket or value"
            )


@component("adversary", "relative_coordinate", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class RelativeCoordinateSettings(PositionAdversarySettings):
    """Add a shift to the offsets of masked queries (AdPE 4.2.3)."""

    index: Literal["relaxed", "straight_through"] = "relaxed"
    """Interpolate between table entries, or take the rounded entry with the interpolated gradient."""
    on_saturation: Literal["keep", "reset"] = "keep"
    """Action if all offsets of a block along an axis are beyond the table and receive no gradient: keep them (paper),
    or reset that axis to zero."""


@component("adversary", "pixels", "trp_scale.methods.adversary.positions:PixelAdversary")
@dataclass(kw_only=True)
class PixelAdversarySettings(AdversarySettings):
    """Perturb the pixels of each image by one step from the clean image, in a separate pass (FGSM; AdPE, App. B)."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        widest = 1.0 if self.norm == "linf" else math.sqrt(3) * config.crops.size  # of [0, 1]^(3 x S x S)
        if self.eps > widest:
            yield (
                f"--adversary.eps {self.eps:g} exceeds the largest distance between two images with pixels in [0, 1] "
                f"in --adversary.norm {self.norm} ({widest:g}); AdPE uses 0.001 to 0.1 with linf"
            )


describe_metrics(
    "adversary",
    title="Adversary",
    look_for=(
        "Whether the adversary acts. A share of the ball near 0 and an effect near 0 mean that it is as good as off; a "
        "share of 1 means that it uses the whole ball. Many saturated offsets mean that the ball is too large for the "
        "relative table."
    ),
    plots=[
        MetricPlot(
            title="Share of the ball",
            names=("share_of_eps",),
            unit="share",
            edge=(1.0, "edge of the ball"),
            note="Norm of the perturbations divided by adversary.eps, mean over all balls.",
        ),
        MetricPlot(title="Norm", names=("norm", "largest_norm"), note="Mean and largest norm of the perturbations."),
        MetricPlot(
            title="Effect",
            names=("effect",),
            unit="share",
            note="Share of the loss that is due to the perturbations, to first order.",
        ),
        MetricPlot(
            title="Sensitivity",
            names=("sensitivity",),
            log=True,
            note="Norm of the gradient of the loss by the perturbations.",
        ),
        MetricPlot(
            title="Saturation",
            names=("saturated",),
            unit="share",
            note="Share of offsets beyond the relative table, where a change has no effect.",
        ),
    ],
)
