"""What the adversary perturbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class AdversaryConfig:
    """Perturbations that ascend on the loss while the weights descend (AdPE 4)."""

    kind: Literal[
        "none", "absolute_embedding", "absolute_coordinate", "relative_embedding", "relative_coordinate", "pixels"
    ] = "none"
    """What is perturbed at masked patches: their position embedding or their coordinates, absolute or relative; pixels:
    each image itself (FGSM, Appendix B)."""
    norm: Literal["l2", "linf"] = "linf"
    """The ball that perturbations stay in."""
    eps: float = 20.0
    """Radius of the ball: in units of the embedding, in patches for coordinates, of pixels in [0, 1]."""
    ascent: Literal["adamw", "sgd", "sign", "linear"] = "adamw"
    """adamw: AdamW without decay, at the weights' learning rate. sgd, sign: their own lr. linear: the one-step rule
    from zero, eps g / ||g|| or eps sign(g) (footnote 2), which needs update = sequential."""
    lr: float = 0.0
    """Step size of sgd and sign, in the units of eps; 0 = not given, which they refuse."""
    update: Literal["parallel", "sequential"] = "parallel"
    """parallel: the backward pass that trains the weights also gives the adversary's gradient. sequential: a pass of
    its own first, then the weights see the new perturbation (twice the cost)."""
    scope: Literal["per_bucket", "value", "shared"] = "per_bucket"
    """relative_embedding: a vector for each bucket of the table, one on the values, or one for all buckets (as printed
    in 4.2.2; it cancels in the softmax and has no effect)."""
    mask_token: Literal["frozen", "learned"] = "frozen"
    """absolute_embedding: a learned mask token can undo the perturbation, since both are added at the same places."""
    where: Literal["encoder", "both"] = "encoder"
    """Blocks that see perturbed positions: the encoder's, or the decoder's too. In the authors' code absolute
    adversaries act in the encoder and relative ones in both, which the recipes of Table A.2 follow."""
    index: Literal["relaxed", "straight_through"] = "relaxed"
    """relative_coordinate: interpolate between table entries, or the rounded entry with the interpolated gradient."""
    on_saturation: Literal["keep", "reset"] = "keep"
    """relative_coordinate: what to do when a block's offsets along an axis all lie beyond the table, where no gradient
    comes back: keep them (paper), or start that axis of the block from zero again."""
    check_every: int = 100
    """Steps between checks that all ranks hold the same perturbation; 0 = never."""
