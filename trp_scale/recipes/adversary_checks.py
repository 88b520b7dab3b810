"""Checks of the adversary's settings; every message names the flag to change."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trp_scale.config import AdversaryConfig, Config

OWN_RATE = ("sgd", "sign")
"""Ascents that take --adversary.lr."""

KINDS_OF = {
    "scope": ("relative_embedding",),
    "mask_token": ("absolute_embedding",),
    "index": ("relative_coordinate",),
    "on_saturation": ("relative_coordinate",),
    "where": ("absolute_embedding", "absolute_coordinate", "relative_embedding", "relative_coordinate"),
}
"""Kinds of adversary that a setting concerns."""


def adversary_problems(config: Config) -> Iterator[str]:
    """Settings that no adversary can have; none without an adversary."""
    adversary = config.adversary
    if adversary.kind == "none":
        return
    yield from _numbers(adversary)
    if config.model.kind == "bert":
        yield (
            f"--adversary.kind is {adversary.kind} but --model.kind is {config.model.kind}, which has no patches; "
            "allowed: --model.kind mae, or --adversary.kind none"
        )
    elif config.model.kind == "mm_mae":
        yield from _modalities(config)
    elif adversary.kind != "pixels":
        yield from _positions(config)
    yield from _pixels(adversary) if adversary.kind == "pixels" else _ascent(adversary)


def _numbers(adversary: AdversaryConfig) -> Iterator[str]:
    if not 0 < adversary.eps < math.inf:
        yield f"--adversary.eps is {adversary.eps}, allowed: more than 0"
    if not 0 <= adversary.lr < math.inf:
        yield f"--adversary.lr is {adversary.lr}, allowed: 0 (not given) or more"
    if adversary.check_every < 0:
        yield f"--adversary.check_every is {adversary.check_every}, allowed: 0 (never) or more"


def _ascent(adversary: AdversaryConfig) -> Iterator[str]:
    if adversary.ascent in OWN_RATE and adversary.lr == 0:
        yield (
            f"--adversary.ascent is {adversary.ascent} but --adversary.lr is not given, and the weights' rate would "
            "hardly move it; allowed: a step size in the units of --adversary.eps, or --adversary.ascent adamw"
        )
    if adversary.ascent not in OWN_RATE and adversary.lr > 0:
        reason = (
            "takes the weights' learning rate" if adversary.ascent == "adamw" else "goes to the ball's edge at once"
        )
        yield (
            f"--adversary.lr is {adversary.lr:g} but --adversary.ascent {adversary.ascent} {reason}; allowed: "
            "--adversary.lr 0, or --adversary.ascent sgd or sign"
        )
    if adversary.ascent == "linear" and adversary.update == "parallel":
        yield (
            "--adversary.ascent is linear, which needs the gradient at zero, but --adversary.update is parallel; "
            "allowed: --adversary.update sequential"
        )


def _pixels(adversary: AdversaryConfig) -> Iterator[str]:
    """FGSM is the one-step rule from the clean image, in a pass of its own: no other update makes sense per image."""
    if adversary.ascent != "linear":
        yield f"--adversary.ascent is {adversary.ascent}, allowed with --adversary.kind pixels: linear"
    if adversary.update != "sequential":
        yield f"--adversary.update is {adversary.update}, allowed with --adversary.kind pixels: sequential"
    if adversary.lr > 0:
        yield f"--adversary.lr is {adversary.lr:g}, allowed with --adversary.kind pixels: 0 (eps is its step)"


def _modalities(config: Config) -> Iterator[str]:
    """Adversaries perturb the positions of masked patches, and MM-MAE's encoder sees no masked patch."""
    kind = config.adversary.kind
    if kind != "pixels":
        yield (
            f"--adversary.kind is {kind} but --model.kind is mm_mae, whose encoder sees no masked patch; allowed: "
            "--adversary.kind pixels or none, or --model.kind mae"
        )
    elif "rgb" not in config.modalities.inputs:
        yield (
            "--adversary.kind is pixels but --modalities.inputs has no rgb; allowed: rgb among them, or "
            "--adversary.kind none"
        )


def _positions(config: Config) -> Iterator[str]:
    adversary, vision = config.adversary, config.vision
    if vision.tokens == "visible":
        yield (
            f"--adversary.kind is {adversary.kind} but --vision.tokens is visible: no masked patch is in the encoder; "
            "allowed: --vision.tokens all, as in the recipe mae_plus_vit_b"
        )
    if adversary.kind.startswith("relative") and vision.positions != "relative":
        yield (
            f"--adversary.kind is {adversary.kind} but --vision.positions is {vision.positions}; allowed: "
            "--vision.positions relative, or one of the absolute kinds"
        )
    if adversary.where == "both" and vision.decoder == "linear":
        yield (
            "--adversary.where is both but --vision.decoder is linear and has no positions; allowed: --adversary.where "
            "encoder, or --vision.decoder transformer"
        )


def adversary_cautions(config: Config) -> list[str]:
    """What is allowed but rarely meant."""
    adversary = config.adversary
    if adversary.kind == "none":
        return []
    found: list[str] = []
    if adversary.kind == "relative_embedding" and adversary.scope == "shared":
        found.append(
            "--adversary.scope shared adds one vector to every bucket, which cancels in the softmax: it has no effect "
            "(AdPE 4.2.2 as printed); per_bucket and value have one"
        )
    if adversary.kind == "absolute_embedding" and adversary.mask_token == "learned":
        found.append(
            "--adversary.mask_token learned lets the mask token undo the perturbation, since both are added at the "
            "same places; frozen does not"
        )
    if adversary.kind == "pixels":
        widest = 1.0 if adversary.norm == "linf" else math.sqrt(3) * config.crops.size  # of [0, 1]^(3 x S x S)
        if adversary.eps > widest:
            found.append(
                f"--adversary.eps {adversary.eps:g} is wider than any two images are apart in --adversary.norm "
                f"{adversary.norm} ({widest:g}), since pixels are in [0, 1]; AdPE takes 0.001 to 0.1 of linf"
            )
    default = AdversaryConfig()
    for name, kinds in KINDS_OF.items():
        value = getattr(adversary, name)
        if adversary.kind not in kinds and value != getattr(default, name):
            found.append(f"--adversary.{name} {value} has no effect with --adversary.kind {adversary.kind}")
    return found
