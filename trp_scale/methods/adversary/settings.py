"""Settings of the adversary: perturbations that ascend on the loss while the weights descend (AdPE 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trp_scale.config.images import ImagePretrainConfig, MaskedAutoencoderConfig
from trp_scale.config.registry import MetricPlot, component, describe_metrics
from trp_scale.config.settings import Settings, setting

OWN_RATE = ("sgd", "sign")
"""Ascents that need --adversary.lr."""


@component("adversary", "none", "trp_scale.methods.adversary.positions:no_adversary")
@dataclass(kw_only=True)
class NoAdversarySettings(Settings):
    """No adversary."""


@dataclass(kw_only=True)
class AdversarySettings(Settings):
    """Settings of every adversary."""

    norm: Literal["l2", "linf"] = "linf"
    """The ball that perturbations stay in."""
    eps: float = setting(20.0, above=0)
    """Radius of the ball: in units of the embedding, in patches for coordinates, of pixels in [0, 1]."""


@dataclass(kw_only=True)
class PositionAdversarySettings(AdversarySettings):
    """Settings of adversaries that perturb where masked patches are."""

    ascent: Literal["adamw", "sgd", "sign", "linear"] = "adamw"
    """adamw: AdamW without decay, at the weights' learning rate or at an lr of its own. sgd, sign: their own lr.
    linear: the one-step rule from zero, eps g / ||g|| or eps sign(g) (footnote 2), which needs update = sequential."""
    lr: float = setting(0.0, at_least=0)
    """Step size in the units of eps. adamw: at the peak of the weights' schedule, which it follows; 0 = the weights'
    own learning rate, the most that it then moves in a step. sgd, sign: of every step; 0 = not given, which they
    refuse."""
    update: Literal["parallel", "sequential"] = "parallel"
    """parallel: the backward pass that trains the weights also gives the adversary's gradient. sequential: a pass of
    its own first, then the weights see the new perturbation (twice the cost)."""
    where: Literal["encoder", "both"] = "encoder"
    """Blocks that see perturbed positions: the encoder's, or the decoder's too. In the authors' code absolute
    adversaries act in the encoder and relative ones in both, which the recipes of Table A.2 follow."""
    check_every: int = setting(100, at_least=0)
    """Steps between checks that all ranks hold the same perturbation; 0 = never."""

    def problems(self, config: ImagePretrainConfig) -> Iterator[str]:
        if isinstance(config, MaskedAutoencoderConfig):
            yield from self._model(config)
        else:
            yield (
                f"--adversary.kind is {self.kind} but --upstream is {config.upstream}, whose encoder sees no masked "
                "patch; allowed: --adversary.kind pixels or none, or --upstream mae"
            )
        yield from self._ascent()

    def _model(self, config: MaskedAutoencoderConfig) -> Iterator[str]:
        """Check what perturbed positions need of the model."""
        vision = config.vision
        if vision.tokens == "visible":
            yield (
                f"--adversary.kind is {self.kind} but --vision.tokens is visible: no masked patch is in the "
                "encoder; allowed: --vision.tokens all, as in the recipe mae_plus_vit_b"
            )
        if self.kind.startswith("relative") and vision.positions != "relative":
            yield (
                f"--adversary.kind is {self.kind} but --vision.positions is {vision.positions}; allowed: "
                "--vision.positions relative, or one of the absolute kinds"
            )
        if self.where == "both" and vision.decoder == "linear":
            yield (
                "--adversary.where is both but --vision.decoder is linear and has no positions; allowed: "
                "--adversary.where encoder, or --vision.decoder transformer"
            )

    def _ascent(self) -> Iterator[str]:
        if self.ascent in OWN_RATE and self.lr == 0:
            yield (
                f"--adversary.ascent is {self.ascent} but --adversary.lr is not given, and the weights' rate would "
                "hardly move it; allowed: a step size in the units of --adversary.eps, or --adversary.ascent adamw"
            )
        if self.ascent == "linear" and self.lr > 0:
            yield (
                f"--adversary.lr is {self.lr:g} but --adversary.ascent linear goes to the ball's edge at once; "
                "allowed: --adversary.lr 0, or --adversary.ascent adamw, sgd or sign"
            )
        if self.ascent == "linear" and self.update == "parallel":
            yield (
                "--adversary.ascent is linear, which needs the gradient at zero, but --adversary.update is parallel; "
                "allowed: --adversary.update sequential"
            )


@component("adversary", "absolute_embedding", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class AbsoluteEmbeddingSettings(PositionAdversarySettings):
    """A vector added to the position embedding of masked patches (AdPE 4.1.1)."""

    mask_token: Literal["frozen", "learned"] = "frozen"
    """A learned mask token can undo the perturbation, since both are added at the same places."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.mask_token == "learned":
            yield (
                "--adversary.mask_token learned lets the mask token undo the perturbation, since both are added at the "
                "same places; frozen does not"
            )


@component("adversary", "absolute_coordinate", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class AbsoluteCoordinateSettings(PositionAdversarySettings):
    """A shift of masked patches on the grid (AdPE 4.1.2)."""


@component("adversary", "relative_embedding", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class RelativeEmbeddingSettings(PositionAdversarySettings):
    """Vectors added to the relative table for masked queries (AdPE 4.2.2)."""

    scope: Literal["per_bucket", "value", "shared"] = "per_bucket"
    """A vector for each bucket of the table, one on the values, or one for all buckets (as printed in 4.2.2; it cancels
    in the softmax and has no effect)."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        if self.scope == "shared":
            yield (
                "--adversary.scope shared adds one vector to every bucket, which cancels in the softmax: it has no "
                "effect (AdPE 4.2.2 as printed); per_bucket and value have one"
            )


@component("adversary", "relative_coordinate", "trp_scale.methods.adversary.positions:position_adversary")
@dataclass(kw_only=True)
class RelativeCoordinateSettings(PositionAdversarySettings):
    """A shift added to the offsets of masked queries (AdPE 4.2.3)."""

    index: Literal["relaxed", "straight_through"] = "relaxed"
    """Interpolate between table entries, or take the rounded entry with the interpolated gradient."""
    on_saturation: Literal["keep", "reset"] = "keep"
    """What to do when a block's offsets along an axis all lie beyond the table, where no gradient comes back: keep them
    (paper), or start that axis of the block from zero again."""


@component("adversary", "pixels", "trp_scale.methods.adversary.pixels:PixelAdversary")
@dataclass(kw_only=True)
class PixelAdversarySettings(AdversarySettings):
    """Each image's pixels, by the one-step rule from the clean image in a pass of its own (FGSM; AdPE, Appendix B)."""

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        widest = 1.0 if self.norm == "linf" else math.sqrt(3) * config.crops.size  # of [0, 1]^(3 x S x S)
        if self.eps > widest:
            yield (
                f"--adversary.eps {self.eps:g} is wider than any two images are apart in --adversary.norm {self.norm} "
                f"({widest:g}), since pixels are in [0, 1]; AdPE takes 0.001 to 0.1 of linf"
            )


describe_metrics(
    "adversary",
    title="Adversary",
    look_for=(
        "Whether it acts: a share of its ball that stays near 0, with hardly any effect, is an adversary that might as "
        "well be off. At the ball's edge it does all it may. Many offsets that saturate say that the ball is too large "
        "for the relative table."
    ),
    plots=[
        MetricPlot(
            title="Share of its ball",
            names=("share_of_eps",),
            unit="share",
            edge=(1.0, "edge of the ball"),
            note="Norm of the perturbations over adversary.eps, the mean of all balls.",
        ),
        MetricPlot(title="Norm", names=("norm", "largest_norm"), note="Of the perturbations, mean and largest."),
        MetricPlot(
            title="Effect",
            names=("effect",),
            unit="share",
            note="Share of the loss that the perturbations make, to first order.",
        ),
        MetricPlot(
            title="Sensitivity",
            names=("sensitivity",),
            log=True,
            note="Norm of the loss's gradient by the perturbations.",
        ),
        MetricPlot(
            title="Saturation",
            names=("saturated",),
            unit="share",
            note="Share of offsets beyond the relative table, which feel no change any more.",
        ),
    ],
)
