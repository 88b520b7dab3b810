"""The adversary: perturbations that ascend on the loss while the weights descend (AdPE 4; docs/algorithms.md)."""

from __future__ import annotations

from trp_scale.adversary.pixels import PixelAdversary
from trp_scale.adversary.positions import POSITIONS
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext
from trp_scale.models.perturbation import PerturbationShape


def build_adversary(run: RunContext, shape: PerturbationShape | None) -> Hook | None:
    """The hook named by `adversary.kind`, or None for `none`: a method that is off leaves no hook at all.

    Args:
        run: whose settings are checked.
        shape: what the model expects as its perturbation; None for kinds that perturb no position.
    """
    config = run.config
    if config.adversary.kind == "none":
        return None
    if config.adversary.kind == "pixels":
        return PixelAdversary(config, run.device)
    assert shape is not None, f"adversary.kind {config.adversary.kind} has a perturbation of some shape"
    return POSITIONS[config.adversary.update](config, shape, run.device)
