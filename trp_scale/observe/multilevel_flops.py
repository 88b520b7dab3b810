"""Arithmetic of a training step with learned masks (MLO-MAE; algorithms.md, section 3)."""

from __future__ import annotations

from trp_scale.config import Config
from trp_scale.observe.throughput import TRAINING_OVER_FORWARD, encoder_forward_flops, mae_step_flops


def multilevel_step_flops(config: Config, *, ranks: int, computed: bool = False) -> float:
    """Model FLOPs of one step of the encoder, averaged over the steps from one update of the masking network to the
    next; one multiply-add is 2 FLOPs.

    With F a forward pass of encoder and decoder over the masked images of a batch, W one of the encoder over as many
    whole images of D_tr (or D_val), T one of the masking network with the patch embedding that it reads:
        every step of the encoder: 3 F, and T for its masks;
        every multilevel.unroll of them, the head's update: W;
        every multilevel.every of those, the masking network's update, which holds the head's: 3 W on D_tr, 3 W on D_val
            (the direction, by both paths), and 2 F without a backward pass (the difference); then T forward and
            backward. Where one pass does not hold a rank's share of both batches, the head's W comes before it.
    second_level joint: every step also has 3 W on D_tr, the head learns in it, and the masking network's update has no
    other pass over D_tr. second_level fine_tuning: the head's update is 3 W of the second encoder.
    feedback reconstruction: the masking network's update is F, and there is no head.
    A selection with a derivative of its own: each F of the masking network's update is 3 F.

    The backward pass counts twice the forward, but of the masking network's first layer, whose input has no gradient,
    once. The head (2 D K for an image), norms, optimizers and vectors over weights are left out, and so is what an
    adversary or U-MAE adds.

    Args:
        config: settings of the run.
        ranks: that split the batches.
        computed: count the last block of F as it is computed, as in `mae_step_flops`.
    """
    settings, crops = config.multilevel, config.crops.count
    images = settings.batch_size or config.batch.global_size
    rows = config.batch.global_size * crops
    masked = mae_step_flops(config, rows=rows, computed=computed) / TRAINING_OVER_FORWARD  # F
    whole = encoder_forward_flops(config) * images * crops  # W
    choice = (_embedding(config) + _network(config)) * rows
    lesson = _network_learning(config) * rows
    lesson += _reading(config) * masked * (1 if settings.feedback == "reconstruction" else 2)
    step = TRAINING_OVER_FORWARD * masked + choice
    if settings.feedback == "reconstruction":
        return step + lesson / (settings.unroll * settings.every)
    lesson += TRAINING_OVER_FORWARD * whole  # on D_val
    update = whole
    if settings.second_level == "joint":
        step += TRAINING_OVER_FORWARD * whole
        update = 0.0
    elif settings.second_level == "fine_tuning":
        update = TRAINING_OVER_FORWARD * whole
    else:
        one_pass = images == ranks * (settings.micro_size or config.batch.micro_size)
        lesson += (TRAINING_OVER_FORWARD - one_pass) * whole  # on D_tr; in one pass the head's own is part of it
    return step + (update + lesson / settings.every) / settings.unroll


def _reading(config: Config) -> int:
    """Forward passes' worth of finding how the reconstruction depends on the masks."""
    return 1 if config.masking.selection == "hard" else TRAINING_OVER_FORWARD


def _embedding(config: Config) -> float:
    """Of all patches of one crop."""
    patches = (config.crops.size // config.vision.patch_size) ** 2
    return float(2 * patches * 3 * config.vision.patch_size**2 * config.model.hidden_size)


def _layers(config: Config) -> tuple[float, float]:
    """Of the masking network's first layer and of its second, forward, for one crop."""
    patches = (config.crops.size // config.vision.patch_size) ** 2
    width, hidden = config.model.hidden_size, config.masking.hidden_size
    if config.masking.network == "flattened":
        return 2.0 * patches * width * hidden, 2.0 * hidden * patches
    return 2.0 * (patches + 1) * width * hidden, 2.0 * patches * hidden  # each patch, and the image's mean


def _network(config: Config) -> float:
    """Of the masking network, forward, for one crop."""
    return sum(_layers(config))


def _network_learning(config: Config) -> float:
    """Of the masking network, forward and backward, for one crop; the first layer's input has no gradient."""
    first, second = _layers(config)
    return 2 * first + TRAINING_OVER_FORWARD * second
