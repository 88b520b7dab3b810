"""The hypergradients of BLO-MAE and of fine-tuning by automatic differentiation, written from MLO-MAE eq. 5 and 13."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.unit.methods.learned_masks.exact_hypergradient import (
    Masked,
    Rule,
    Weights,
    cross_entropy,
    descended,
    reconstruction,
)
from trp_scale.core.batch import Batch


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
