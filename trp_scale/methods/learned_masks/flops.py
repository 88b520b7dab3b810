"""FLOPs of a training step with learned masks (MLO-MAE; docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.methods.learned_masks.masks import NETWORKS
from trp_scale.methods.learned_masks.settings import (
    FineTuningSettings,
    HeadSettings,
    JointSettings,
    LearnedMasksSettings,
    ReconstructionSettings,
)
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops


class Passes(NamedTuple):
    """FLOPs of forward passes over a global batch.

    Attributes:
        whole: W, the encoder on the whole images of D_tr, or of D_val; 0 without labels.
        choice: T, the masking network and the patch embedding that it reads.
        outer: the masking network forward and backward, without the gradient of its input; then twice forward, learned
            and untrained, to compare their masks.
    """

    whole: float
    choice: float
    outer: float


def masks_step_flops(
    config: MaskedAutoencoderConfig, make_model: Callable[[], nn.Module], *, masked: float, ranks: int
) -> float:
    """Return the model FLOPs of one inner step, averaged over the inner steps between two outer steps.

    With F = encoder and decoder on the masked images, W and T as in `Passes`:
        inner step: 3 F, and T for its masks;
        head step after multilevel.unroll inner steps: W;
        outer step after multilevel.every head steps: 3 W on D_tr, which includes the head step, 3 W on D_val (both give
            dL_val / dE'), 2 F without a backward pass (the finite difference), and the outer passes of T; another W for
            the head if one pass does not hold a rank's share of both batches.
    kind reconstruction: the outer step is F, without a head.
    kind joint: each inner step includes 3 W on D_tr, in which the head learns.
    kind fine_tuning: the head step is 3 W of the second encoder; its 3 W on D_val give dL_val / dF'.
    mode look_ahead: a separate head step, W; the outer step adds unroll x (3 F + T), and with derivative full
        (unroll - 1) x (6 F + 2 F) and the outer passes of T for each of these steps.
    selection other than hard: each F of a difference is 3 F.

    A backward pass counts as two forward passes. The head (2 D K per image), norms, optimizers, vectors over weights,
    the adversary and U-MAE are not counted.

    Args:
        make_model: makes the masked autoencoder.
        masked: F.
        ranks: number of ranks that split the batches.
    """
    settings: LearnedMasksSettings = config.multilevel
    passes = _count_passes(config, make_model)
    inner = TRAINING_OVER_FORWARD * masked + passes.choice
    derivative = masked * (1 if settings.selection == "hard" else TRAINING_OVER_FORWARD)  # dL_rec / d masks
    difference = 2 * derivative + passes.outer
    train = TRAINING_OVER_FORWARD * passes.whole
    head, outer = 0.0, train + difference
    match settings:
        case ReconstructionSettings():
            outer = derivative + passes.outer
        case JointSettings():
            inner += train
        case FineTuningSettings():
            head = train
        case HeadSettings():
            head = passes.whole
            images, micro = settings.batches(config, ranks)
            outer += train + (0.0 if images == ranks * micro else passes.whole)
            if settings.mode == "committed":
                outer -= head  # the outer step includes this head step
            else:
                outer += settings.unroll * inner
                if settings.derivative == "full":
                    outer += (settings.unroll - 1) * (2 * TRAINING_OVER_FORWARD * masked + difference)
        case _:
            raise NotImplementedError(f"the FLOPs of multilevel.kind {settings.kind} are not known")
    return inner + (head + outer / settings.every) / settings.unroll


def _count_passes(config: MaskedAutoencoderConfig, make_model: Callable[[], nn.Module]) -> Passes:
    settings, crops, patch = config.multilevel, config.crops, config.vision.patch_size
    patches = (crops.size // patch) ** 2
    meta = torch.device("meta")
    image = torch.empty(1, patches, 3 * patch**2, device=meta)
    order = torch.empty(1, patches, dtype=torch.int64, device=meta)
    embeddings = torch.empty(1, patches, config.model.hidden_size, device=meta)

    def make_network() -> nn.Module:
        return NETWORKS[settings.network](config)

    def learn(network: nn.Module) -> None:
        with torch.enable_grad():
            network(embeddings).sum().backward()

    embed = count_flops(make_model, lambda model: model(image, order, order[:, :0], output="patch_embedding"))
    choose = count_flops(make_network, lambda network: network(embeddings))
    rows, whole = config.batch.global_size * crops.count, 0.0
    if settings.reads_labels:
        images = settings.batch_size or config.batch.global_size
        encode = count_flops(make_model, lambda model: model(image, order, order[:, :0], output="features"))
        whole = images * crops.count * encode
    return Passes(
        whole=whole,
        choice=rows * (embed + choose),
        outer=rows * (count_flops(make_network, learn) + 2 * choose),
    )
