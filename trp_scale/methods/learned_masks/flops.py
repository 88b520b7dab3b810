"""Arithmetic of a training step with learned masks (MLO-MAE; docs/algorithms.md)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import singledispatch

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.methods.learned_masks.masking_network import NETWORKS
from trp_scale.methods.learned_masks.settings import (
    FineTuningSettings,
    HeadSettings,
    JointSettings,
    LabelledSettings,
    LearnedMasksSettings,
    MultilevelSettings,
    ReconstructionSettings,
)
from trp_scale.models.flops import TRAINING_OVER_FORWARD, encoder_forward_flops, mae_step_flops


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward passes over a global batch, in FLOPs.

    Attributes:
        masked: F, encoder and decoder over the masked images.
        whole: W, the encoder over the whole images of D_tr, or of D_val; 0 without labels.
        choice: T, the masking network, and the patch embedding that it reads.
        outer: the masking network forward and backward; the gradient of its first layer's input is not needed. Then
            twice forward, learned and untrained, to compare their masks.
    """

    masked: float
    whole: float
    choice: float
    outer: float


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """FLOPs of what a cycle is made of. Attributes: inner, head, outer: of one step of each."""

    inner: float
    head: float
    outer: float


def multilevel_step_flops(config: MaskedAutoencoderConfig, *, ranks: int, computed: bool = False) -> float:
    """Model FLOPs of one inner step, averaged over the inner steps from one outer step to the next; one multiply-add is
    2 FLOPs. Those of a masked autoencoder's step where masks are drawn at random.

    With F, W and T as in `Passes`:
        every inner step: 3 F, and T for its masks;
        after multilevel.unroll of them, a head step: W;
        after multilevel.every of those, an outer step: 3 W on D_tr, in which the head step is done, 3 W on D_val (both
            give dL_val / dE'), 2 F without a backward pass (the finite difference), and T's own passes. Where one pass
            does not hold a rank's share of both batches, W for the head comes before them.
    kind reconstruction: the outer step is F, and there is no head.
    kind joint: 3 W on D_tr are part of every inner step, in which the head learns.
    kind fine_tuning: the head step is 3 W of the second encoder, whose 3 W on D_val give dL_val / dF'.
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
    settings: MultilevelSettings = config.multilevel
    if not isinstance(settings, LearnedMasksSettings):
        return mae_step_flops(config, rows=config.batch.global_size * config.crops.count, computed=computed)
    cycle = _cycle(settings, config, _passes(config, computed), ranks)
    return cycle.inner + (cycle.head + cycle.outer / settings.every) / settings.unroll


@singledispatch
def _cycle(settings: LearnedMasksSettings, config: MaskedAutoencoderConfig, passes: Passes, ranks: int) -> Cycle:
    raise NotImplementedError(f"nobody has said what a cycle of multilevel.kind {settings.kind} costs")


@_cycle.register
def _(settings: ReconstructionSettings, config: MaskedAutoencoderConfig, passes: Passes, ranks: int) -> Cycle:
    return Cycle(inner=_inner(passes), head=0.0, outer=_mask_derivative(settings, passes) + passes.outer)


@_cycle.register
def _(settings: JointSettings, config: MaskedAutoencoderConfig, passes: Passes, ranks: int) -> Cycle:
    whole = TRAINING_OVER_FORWARD * passes.whole
    return Cycle(inner=_inner(passes) + whole, head=0.0, outer=whole + _by_difference(settings, passes))


@_cycle.register
def _(settings: FineTuningSettings, config: MaskedAutoencoderConfig, passes: Passes, ranks: int) -> Cycle:
    whole = TRAINING_OVER_FORWARD * passes.whole
    return Cycle(inner=_inner(passes), head=whole, outer=whole + _by_difference(settings, passes))


@_cycle.register
def _(settings: HeadSettings, config: MaskedAutoencoderConfig, passes: Passes, ranks: int) -> Cycle:
    images, micro = settings.batches(config, ranks)
    first = 0.0 if images == ranks * micro else passes.whole
    outer = first + 2 * TRAINING_OVER_FORWARD * passes.whole + _by_difference(settings, passes)
    if settings.mode == "look_ahead":
        outer += _unrolled(settings, passes)
    else:
        outer -= passes.whole  # the head's step, with which finding dL_val / dE' began
    return Cycle(inner=_inner(passes), head=passes.whole, outer=outer)


def _inner(passes: Passes) -> float:
    return TRAINING_OVER_FORWARD * passes.masked + passes.choice


def _unrolled(settings: HeadSettings, passes: Passes) -> float:
    """FLOPs that unrolled steps add to an outer step."""
    flops = settings.unroll * _inner(passes)
    if settings.derivative == "full":
        gradients = 2 * TRAINING_OVER_FORWARD * passes.masked
        flops += (settings.unroll - 1) * (gradients + _by_difference(settings, passes))
    return flops


def _by_difference(settings: LabelledSettings, passes: Passes) -> float:
    return 2 * _mask_derivative(settings, passes) + passes.outer


def _mask_derivative(settings: LearnedMasksSettings, passes: Passes) -> float:
    """dL_rec / d masks at one place in the weights."""
    return passes.masked * (1 if settings.selection == "hard" else TRAINING_OVER_FORWARD)


def _passes(config: MaskedAutoencoderConfig, computed: bool) -> Passes:
    """The passes of these settings. A curriculum counts with the ratio in the middle of the run."""
    settings = config.multilevel
    if settings.final_ratio:
        config = copy.deepcopy(config)
        config.masking.ratio = 0.5 * (config.masking.ratio + settings.final_ratio)
    width, crops = config.model.hidden_size, config.crops
    rows = config.batch.global_size * crops.count
    patches = (crops.size // config.vision.patch_size) ** 2
    first, second = NETWORKS[settings.network].multiply_adds(patches, width, settings.hidden_size)
    embedding = patches * 3 * config.vision.patch_size**2 * width
    whole = 0.0
    if settings.reads_labels:
        images = settings.batch_size or config.batch.global_size
        whole = images * crops.count * encoder_forward_flops(config)
    return Passes(
        masked=mae_step_flops(config, rows=rows, computed=computed) / TRAINING_OVER_FORWARD,
        whole=whole,
        choice=2.0 * rows * (embedding + first + second),
        outer=2.0 * rows * (2 * first + TRAINING_OVER_FORWARD * second + 2 * (first + second)),
    )
