"""The methods: how tasks are balanced, what the adversary perturbs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class BalancerConfig:
    """How the losses of the tasks become one loss (TRP 3)."""

    kind: Literal["uniform", "proportional", "minimax", "group_dro", "uncertainty", "gradnorm", "dwa"] = "minimax"
    """uniform: 1/T each. proportional: by number of elements (plain BERT). minimax: softmax of alpha x loss (eq. 7).
    group_dro: exponentiated gradient ascent on the weights (Sagawa et al.). uncertainty: learned variances (Kendall et
    al.). gradnorm: equal training rates (Chen et al.). dwa: by how fast losses fall (Liu et al.)."""
    alpha: float = 1.0
    """Sharpness of the softmax over task losses."""
    alpha_schedule: Literal["constant", "theorem", "hard"] = "constant"
    """constant, theorem = the growing alpha of TRP Theorem 3.1 (radius, lipschitz, bound), hard = the worst alone."""
    radius: float = 1.0
    """R0 of Theorem 3.1: distance from the start to the optimum."""
    lipschitz: float = 1.0
    """L' of Theorem 3.1: Lipschitz constant of the task losses."""
    bound: float = 1.0
    """B of Theorem 3.1: bound of the task losses."""
    estimate: Literal["exact", "lagged", "micro"] = "exact"
    """exact: losses of this global batch (one more forward pass if there is accumulation). lagged: of the last step,
    free. micro: of each micro-batch alone; wrong, kept as a labelled baseline."""
    scale: Literal["none", "initial", "reference"] = "none"
    """The losses that a balancer reads: as they are (paper), as L / L at the first step, or as L - reference."""
    reference: dict[str, float] = field(default_factory=dict)
    """Loss subtracted from each task's for scale = reference, by task name."""
    total: Literal["1", "paper"] = "1"
    """Sum of the balanced weights: 1, or each method's own (uniform_form: sum, dwa, gradnorm: T). The weights of
    uncertainty have no fixed sum and stay as they are."""
    loss_ema: float = 0.0
    """Smoothing of the losses that enter the softmax; 0 = none (paper)."""
    min_count: int = 0
    """A task with fewer elements than this in the global batch takes no part in the maximum of this step."""
    uniform_form: Literal["mean", "sum"] = "mean"
    """uniform, with total = paper: 1/T each (TRP eq. 4), or 1 each (MultiMAE)."""
    group_dro_rate: float = 0.01
    """group_dro: step size of the weights' ascent, eta_q of Sagawa et al."""
    group_dro_adjustment: float = 0.0
    """group_dro: C of the adjustment C / sqrt(n_t) that is added to each loss, n_t elements of the global batch."""
    uncertainty_form: Literal["multimae", "kendall"] = "multimae"
    """multimae: sum of exp(-s) L + s. kendall: L / (2 sigma^2) for regression, L / sigma^2 for classification, plus
    log sigma, where s = log sigma^2."""
    uncertainty_lr: float = 1e-3
    """uncertainty: learning rate of the s, by Adam without decay."""
    gradnorm_at: Literal["weights", "representation"] = "weights"
    """gradnorm: the norm of each task's gradient of the last shared layer's weights (Chen et al.), or of the shared
    representation itself."""
    gradnorm_alpha: float = 1.5
    """gradnorm: strength of the pull towards equal training rates (Chen et al.)."""
    gradnorm_lr: float = 0.025
    """gradnorm: learning rate of the weights, by Adam without decay."""
    dwa_temperature: float = 2.0
    """dwa: temperature of the softmax over the ratios of losses (Liu et al.)."""
    dwa_interval_steps: int = 0
    """dwa: steps over which losses are averaged; 0 = one epoch (paper)."""


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
