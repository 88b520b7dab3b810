"""How a masking network learns: three levels of optimisation (MLO-MAE 3.2, Appendix A)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class MultilevelConfig:
    """Levels of MLO-MAE: inner steps of encoder and decoder on D_u, head steps on D_tr, outer steps of the masking
    network on D_val. Read unless masking.network is none. Defaults are the paper's Table 11 and section 3.3."""

    feedback: Literal["downstream", "reconstruction"] = "downstream"
    """What the masking network learns from: downstream = it lowers the head's loss on D_val (paper). reconstruction =
    it raises the reconstruction loss, without labels (the ablation that leaves downstream feedback out)."""
    second_level: Literal["head", "joint", "fine_tuning"] = "head"
    """head: the head learns on D_tr with the encoder frozen (eq. 2). joint: encoder, decoder and head learn together
    on D_tr's classes and gamma x reconstruction (BLO-MAE, eq. 5). fine_tuning: a second encoder, held near the first by
    proximity, learns with the head (eq. 13)."""
    gamma: float = 1.0
    """joint: weight of the reconstruction, that of the classification is 1 (eq. 5)."""
    proximity: float = 1.0
    """fine_tuning: lambda of lambda ||F - E||^2 (eq. 13). A head step takes F 2 x learning rate x lambda of the way to
    E."""
    mode: Literal["committed", "look_ahead"] = "committed"
    """The inner step that the hypergradient goes through. committed: the run's own step of AdamW, second moment held.
    look_ahead: unrolled steps of gradient descent that are taken back, as printed (eq. 6-8)."""
    look_ahead_lr: float = 0.0
    """look_ahead: learning rate of the unrolled inner steps, eta_E; 0 = the weights' learning rate at this step."""
    unroll: int = 2
    """Inner steps for each head step (3.3: 2; Table 11: 1; Table 7: 1, 2, 5)."""
    every: int = 1
    """Head steps for each outer step (Table 16: 1, 5)."""
    derivative: Literal["last", "full"] = "last"
    """How far the hypergradient goes back. last: through the last inner step. full: through all unrolled ones
    (look_ahead only), by finite differences of gradients; for comparison, four more passes for each step."""
    unlabelled: Literal["train", "all"] = "train"
    """D_u: the images of D_tr (B.3), or of D_tr and D_val."""
    validation_share: float = 0.2
    """Share of the training set's blocks that are D_val, by a hash of their keys (B.3: 80/20). The rest is D_tr. What
    data.validation_fraction holds out is in neither."""
    batch_size: int = 0
    """Images of D_tr in a head step, and of D_val in an outer step, over all ranks; 0 = batch.global_size."""
    micro_size: int = 0
    """Images of D_tr, and of D_val, in a forward pass on one rank; 0 = batch.micro_size. An outer step costs a seventh
    less if one pass holds them all."""
    pooling: Literal["mean", "class"] = "mean"
    """The head's input: the mean of the encoder's patch tokens, or its class token; of the whole image, unmasked. The
    paper's head reads "the representation", the authors' code the class token, as the paper's recipes do."""
    head_norm: Literal["none", "layer"] = "none"
    """Normalisation of the head's input. none: the paper. layer: each image's features, without learned weights."""
    head_dropout: float = 0.0
    """Dropout of the head's input while it learns."""
    head_lr: float = 4e-5
    """Peak learning rate of the head, with the weights' schedule (Table 11)."""
    head_weight_decay: float = 0.05
    """Decay of the head's matrix (Table 11)."""
    lr: float = 4e-5
    """Peak learning rate of the masking network, with the weights' schedule (Table 11)."""
    weight_decay: float = 0.05
    """Decay of the masking network's matrices (Table 11)."""
    eps: float = 1e-8
    """AdamW's eps of the masking network. It is multiplied by optimizer.lr (or look_ahead_lr), because hypergradients
    carry that rate; with fine_tuning also by 2 optimizer.lr proximity. feedback reconstruction takes it as it is."""
    difference: float = 1e-2
    """Length of the move to each side in a finite difference (fp32: 1e-2; float64: 1e-4)."""
    exact_every: int = 0
    """Outer steps between comparisons with the exact hypergradient; 0 = never. It is found by automatic differentiation
    in float64 on whole weights: for small models only."""
