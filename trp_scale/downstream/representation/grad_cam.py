"""Which patches a fine-tuned classifier decides by: Grad-CAM (Selvaraju et al. 2017, eq. 1-2; MLO-MAE Figure 5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.downstream.classification.model import ImageClassifier


class ClassActivation(NamedTuple):
    """Grad-CAM of each image.

    Attributes:
        maps: [B, G, G], zero or more, not scaled.
        predicted: [B] class with the highest logit.
    """

    maps: Tensor
    predicted: Tensor


def grad_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """[B, N, D] features of patches and the gradient of a class's logit there -> [B, G, G].

    A feature's weight is its gradient averaged over the patches (eq. 1); a patch's value is the weighted sum of its
    features, negative ones as 0 (eq. 2).
    """
    weights = gradients.mean(1, keepdim=True)  # [B, 1, D]
    values = F.relu((weights * activations).sum(-1))  # [B, N]
    grid = round(values.shape[1] ** 0.5)
    return values.reshape(-1, grid, grid)


def class_activation(model: ImageClassifier, images: Tensor, classes: Tensor | None = None) -> ClassActivation:
    """Grad-CAM on the first norm of the last block, as MLO-MAE has it, over the patches.

    Args:
        model: in evaluation mode.
        images: [B, 3, S, S] normalised.
        classes: [B] whose logit is explained; None = the predicted one.
    """
    kept: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    handle = model.encoder.blocks[-1].norm1.register_forward_hook(keep)  # type: ignore[union-attr]
    try:
        with torch.enable_grad():
            logits = model(images)  # [B, C]
    finally:
        handle.remove()
    predicted = logits.argmax(1)
    explained = logits.gather(1, (predicted if classes is None else classes).unsqueeze(1))
    # Images do not meet in the model, so the sum's gradient is each image's own.
    (gradients,) = torch.autograd.grad(explained.sum(), kept[0])  # [B, 1 + N, D]
    return ClassActivation(grad_cam(kept[0].detach()[:, 1:], gradients[:, 1:]), predicted)
