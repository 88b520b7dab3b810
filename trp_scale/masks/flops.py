"""Arithmetic of a training step with learned masks (MLO-MAE; docs/algorithms.md)."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from trp_scale.config import Config
from trp_scale.observe.throughput import TRAINING_OVER_FORWARD, encoder_forward_flops, mae_step_flops


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward passes over a global batch, in FLOPs.

    Attributes:
        masked: F, encoder and decoder over the masked images.
        whole: W, the encoder over the whole images of D_tr, or of D_val.
        choice: T, the masking network, and the patch embedding that it reads.
        outer: the masking network forward and backward; the gradient of its first layer's input is not needed.
    """

    masked: float
    whole: float
    choice: float
    outer: float


def multilevel_step_flops(config: Config, *, ranks: int, computed: bool = False) -> float:
    """Model FLOPs of one inner step, averaged over the inner steps from one outer step to the next; one multiply-add is
    2 FLOPs.

    With F, W and T as in `Passes`:
        every inner step: 3 F, and T for its masks;
        after multilevel.unroll of them, a head step: W;
        after multilevel.every of those, an outer step: 3 W on D_tr, in which the head step is done, 3 W on D_val (both
            give dL_val / dE'), 2 F without a backward pass (the finite difference), and T's own forward and backward
            pass. Where one pass does not hold a rank's share of both batches, W for the head comes before them.
    feedback reconstruction: the outer step is F, and there is no head.
    second_level joint: 3 W on D_tr are part of every inner step, in which the head learns.
    second_level fine_tuning: the head step is 3 W of the second encoder, whose 3 W on D_val give dL_val / dF'.
    mode look_ahead: the head step is its own, W; the outer step begins with unroll x (3 F + T), and with derivative
        full it has (unroll - 1) x (6 F + 2 F) more, and T's own passes for each of the steps.
    A selection with a derivative of its own: each F of a difference is 3 F.

    The backward pass counts twice the forward. The head (2 D K for an image), norms, optimizers and vectors over
    weights are left out, and so is what an adversary or U-MAE adds.

    Args:
        config: settings of the run.
        ranks: that split the batches.
        computed: count the last block of F as it is computed, as in `mae_step_flops`.
    """
    settings, passes = config.multilevel, _passes(config, computed)
    step = TRAINING_OVER_FORWARD * passes.masked + passes.choice
    if settings.feedback == "reconstruction":
        head_step, outer_step = 0.0, _mask_derivative(config, passes) + passes.outer
    elif settings.second_level == "joint":
        step += TRAINING_OVER_FORWARD * passes.whole
        head_step, outer_step = 0.0, TRAINING_OVER_FORWARD * passes.whole + _outer_step_by_difference(config, passes)
    elif settings.second_level == "fine_tuning":
        head_step = TRAINING_OVER_FORWARD * passes.whole
        outer_step = TRAINING_OVER_FORWARD * passes.whole + _outer_step_by_difference(config, passes)
    else:
        head_step = passes.whole
        outer_step = _encoder_gradient(config, passes, ranks) + _outer_step_by_difference(config, passes)
        if settings.mode == "look_ahead":
            outer_step += _unrolled(config, passes)
        else:
            outer_step -= head_step  # which finding dL_val / dE' began with
    return step + (head_step + outer_step / settings.every) / settings.unroll


def _encoder_gradient(config: Config, passes: Passes, ranks: int) -> float:
    """The head's step and dL_val / dE'."""
    settings, batch = config.multilevel, config.batch
    images, micro = settings.batch_size or batch.global_size, settings.micro_size or batch.micro_size
    first = 0.0 if images == ranks * micro else passes.whole
    return first + 2 * TRAINING_OVER_FORWARD * passes.whole


def _unrolled(config: Config, passes: Passes) -> float:
    """What unrolled steps that are taken back add to an outer step."""
    settings = config.multilevel
    gradient = TRAINING_OVER_FORWARD * passes.masked
    flops = settings.unroll * (gradient + passes.choice)
    if settings.derivative == "full":
        flops += (settings.unroll - 1) * (2 * gradient + _outer_step_by_difference(config, passes))
    return flops


def _outer_step_by_difference(config: Config, passes: Passes) -> float:
    return 2 * _mask_derivative(config, passes) + passes.outer


def _mask_derivative(config: Config, passes: Passes) -> float:
    """dL_rec / d masks at one place in the weights."""
    return passes.masked * (1 if config.masking.selection == "hard" else TRAINING_OVER_FORWARD)


def _passes(config: Config, computed: bool) -> Passes:
    """The passes of these settings. A curriculum counts with the ratio in the middle of the run."""
    if config.masking.final_ratio:
        config = copy.deepcopy(config)
        config.masking.ratio = 0.5 * (config.masking.ratio + config.masking.final_ratio)
    model, masking, crops = config.model, config.masking, config.crops
    rows = config.batch.global_size * crops.count
    patches = (crops.size // config.vision.patch_size) ** 2
    if masking.network == "flattened":
        first, second = patches * model.hidden_size * masking.hidden_size, masking.hidden_size * patches
    else:  # each patch, and the image's mean
        first, second = (patches + 1) * model.hidden_size * masking.hidden_size, patches * masking.hidden_size
    embedding = patches * 3 * config.vision.patch_size**2 * model.hidden_size
    images = (config.multilevel.batch_size or config.batch.global_size) * crops.count
    return Passes(
        masked=mae_step_flops(config, rows=rows, computed=computed) / TRAINING_OVER_FORWARD,
        whole=images * encoder_forward_flops(config),
        choice=2.0 * rows * (embedding + first + second),
        outer=2.0 * rows * (2 * first + TRAINING_OVER_FORWARD * second),
    )
