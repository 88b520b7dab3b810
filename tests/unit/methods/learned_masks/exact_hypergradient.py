"""The hypergradient by automatic differentiation through unrolled steps, in float64 with plain attention.

Written from MLO-MAE's equations 1, 5-8 and 13 and the rules of AdamW; it shares the model's forward pass with what it
checks and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.synthetic_images import PATCH
from trp_scale.core.batch import Batch
from trp_scale.models.patches import ImagePatches, gather_patches, normalise_patches

Weights = dict[str, Tensor]
MaskOf = Callable[[Tensor, int], Tensor]
"""Probabilities [B, N] and the number of masked patches -> a soft mask [B, N]."""
Rule = Callable[[str, Tensor, Tensor], Tensor]
"""Name, weight and gradient -> the weight after a step."""


@dataclass
class Masked:
    """A lower batch: all images of the global batch, its masks, and the masking network's input."""

    batch: Batch
    visible: Tensor
    masked: Tensor
    embeddings: Tensor


def patches_of(batch: Batch) -> Tensor:
    """[R k, N, P] float64."""
    return ImagePatches(PATCH)(batch["images"].flatten(0, 1)).double()


def reconstruction(
    model: nn.Module,
    weights: Weights,
    network: nn.Module,
    own: Weights,
    lower: Masked,
    *,
    normalise: bool = False,
    mask_of: MaskOf | None = None,
) -> Tensor:
    """Equation 1: masked patches' mean squared errors, each times its probability, over the number of masked patches
    or over the sum of their probabilities.

    Args:
        mask_of: what stands for the hard mask in derivatives: it scales the errors of masked patches and takes the
            tokens of visible ones away, both with the value of the hard mask.
    """
    patches = patches_of(lower.batch)
    sigma = functional_call(network, own, (lower.embeddings,))  # [B, N]
    chosen = sigma.gather(1, lower.masked)
    gate = {}
    if mask_of is not None:
        mask = mask_of(sigma, lower.masked.shape[1])
        hard = torch.zeros_like(mask).scatter(1, lower.masked, 1.0) + mask - mask.detach()
        chosen = chosen * hard.gather(1, lower.masked)
        gate = {"gate": 1.0 - hard.gather(1, lower.visible)}
    prediction = functional_call(model, weights, (patches, lower.visible, lower.masked), gate).prediction
    errors = (prediction - normalise_patches(gather_patches(patches, lower.masked))).square().mean(-1)  # [B, M]
    return (chosen * errors).sum() / (chosen.sum() if normalise else chosen.numel())


def cross_entropy(
    model: nn.Module, weights: Weights, head: tuple[Tensor, Tensor], batch: Batch, pooling: str
) -> Tensor:
    """Mean over the images."""
    patches = patches_of(batch)
    every = torch.arange(patches.shape[1]).expand(len(patches), -1)
    tokens = functional_call(model, weights, (patches, every, every[:, :0]), {"output": "features"})
    features = tokens[:, 0] if pooling == "class" else tokens[:, 1:].mean(1)
    labels = batch["labels"].repeat_interleave(batch["images"].shape[1])
    return F.cross_entropy(F.linear(features, *head), labels)


def descended(weights: Mapping[str, Tensor], loss: Tensor, rule: Rule) -> Weights:
    """Every weight after a step, with a graph through its gradient."""
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True, allow_unused=True)
    pairs = zip(weights.items(), gradients, strict=True)
    return {
        name: rule(name, weight, torch.zeros_like(weight) if gradient is None else gradient)
        for (name, weight), gradient in pairs
    }


def hypergradient(
    model: nn.Module,
    weights: Weights,
    network: nn.Module,
    own: Weights,
    head: tuple[Tensor, Tensor],
    *,
    lower: list[Masked],
    train: Batch,
    validation: Batch,
    encoder_rule: Rule,
    head_rule: Rule,
    pooling: str = "mean",
    normalise: bool = False,
    mask_of: MaskOf | None = None,
    through_head: bool = True,
    through_encoder: bool = True,
) -> Weights:
    """dL_val / dT of the encoder's steps over `lower`, the head's step and the validation loss after them."""
    own = {name: value.detach().clone().requires_grad_() for name, value in own.items()}
    present = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
    with sdpa_kernel(SDPBackend.MATH):
        for window in lower:
            loss = reconstruction(model, present, network, own, window, normalise=normalise, mask_of=mask_of)
            present = descended(present, loss, encoder_rule)
        start = {"weight": head[0].detach().requires_grad_(), "bias": head[1].detach().requires_grad_()}
        seen_by_head = present if through_head else {name: value.detach() for name, value in present.items()}
        loss = cross_entropy(model, seen_by_head, (start["weight"], start["bias"]), train, pooling)
        moved = descended(start, loss, head_rule)
        asked = present if through_encoder else {name: value.detach() for name, value in present.items()}
        answer = cross_entropy(model, asked, (moved["weight"], moved["bias"]), validation, pooling)
        gradients = torch.autograd.grad(answer, list(own.values()))
    return dict(zip(own, gradients, strict=True))


def soft_mask(temperature: float) -> MaskOf:
    """SoftSort (Prillo and Eisenschlos 2020, eq. 4): rows of softmax(-|sorted s 1^T - 1 s^T| / tau); the first M of
    them are what is masked."""

    def mask_of(sigma: Tensor, masked: int) -> Tensor:
        rows = []
        for scores in sigma:
            ranked = scores.sort(descending=True).values
            permutation = (-(ranked[:, None] - scores[None, :]).abs() / temperature).softmax(-1)  # [N, N]
            rows.append(permutation[:masked].sum(0))
        return torch.stack(rows)

    return mask_of


def joined(batches: list[Batch]) -> Batch:
    """One batch of all rows."""
    fields = {name: torch.cat([each[name] for each in batches]) for name in batches[0].fields}
    return Batch(fields=fields, keys=torch.cat([each.keys for each in batches]), start=batches[0].start)


class Exact(NamedTuple):
    """Attributes: hypergradient: dL_val / dT; encoder, head: what is asked on D_val, E' or F', and C'."""

    hypergradient: Weights
    encoder: Weights
    head: Weights


def leaves(weights: Weights) -> Weights:
    return {name: value.detach().clone().requires_grad_() for name, value in weights.items()}


def pair(head: Weights) -> tuple[Tensor, Tensor]:
    return head["weight"], head["bias"]


@dataclass(kw_only=True)
class Levels:
    """What the exact hypergradient of the last step of a cycle needs.

    Attributes:
        encoder, tuned, head, network: weights before the step: of E, F (E without a second encoder), C and T.
        encoder_rule, tuned_rule, head_rule: their steps.
        lower, train, validation: global batches of the step.
    """

    model: nn.Module
    masking: nn.Module
    encoder: Weights
    tuned: Weights
    head: Weights
    network: Weights
    encoder_rule: Rule
    tuned_rule: Rule
    head_rule: Rule
    lower: Masked
    train: Batch
    validation: Batch

    def joint(self, gamma: float, *, normalise: bool) -> Exact:
        """One step of encoder and head down L_cls(D_tr) + gamma L_rec (eq. 5)."""
        own, present, start = leaves(self.network), leaves(self.encoder), leaves(self.head)
        with sdpa_kernel(SDPBackend.MATH):
            classes = cross_entropy(self.model, present, pair(start), self.train, "mean")
            masked = reconstruction(self.model, present, self.masking, own, self.lower, normalise=normalise)
            moved = descended(present, classes + gamma * masked, self.encoder_rule)
            return self._asked(own, moved, descended(start, classes + gamma * masked, self.head_rule))

    def fine_tuned(self, pull: float) -> Exact:
        """E's step, and after it F's and the head's: F' = F - step(grad L_cls(F, C)) - pull (F - E') (eq. 13, pull = 2
        eta lambda)."""
        own, present, second, start = map(leaves, (self.network, self.encoder, self.tuned, self.head))
        with sdpa_kernel(SDPBackend.MATH):
            masked = reconstruction(self.model, present, self.masking, own, self.lower)
            moved = descended(present, masked, self.encoder_rule)
            classes = cross_entropy(self.model, second, pair(start), self.train, "mean")
            stepped = descended(second, classes, self.tuned_rule)
            pulled = {name: stepped[name] - pull * (second[name] - moved[name]) for name in second}
            return self._asked(own, pulled, descended(start, classes, self.head_rule))

    def _asked(self, own: Weights, encoder: Weights, head: Weights) -> Exact:
        """Differentiate L_val by the masking network's weights."""
        answer = cross_entropy(self.model, encoder, pair(head), self.validation, "mean")
        gradients = torch.autograd.grad(answer, list(own.values()))
        held = ({name: value.detach() for name, value in weights.items()} for weights in (encoder, head))
        return Exact(dict(zip(own, gradients, strict=True)), *held)
