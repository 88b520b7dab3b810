"""The hypergradients of BLO-MAE and of fine-tuning by automatic differentiation, written from MLO-MAE eq. 5 and 13."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
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


@dataclass
class Found:
    """Attributes: hypergradient: dL_val / dT; encoder, head: what is asked on D_val, E' or F', and C'."""

    hypergradient: Weights
    encoder: Weights
    head: Weights


def leaves(weights: Weights) -> Weights:
    return {name: value.detach().clone().requires_grad_() for name, value in weights.items()}


def held(weights: Weights) -> Weights:
    return {name: value.detach() for name, value in weights.items()}


def pair(head: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    return head["weight"], head["bias"]


def joint(
    model: nn.Module,
    weights: Weights,
    network: nn.Module,
    own: Weights,
    head: Weights,
    *,
    lower: Masked,
    train: Batch,
    validation: Batch,
    encoder_rule: Rule,
    head_rule: Rule,
    gamma: float,
    normalise: bool = False,
) -> Found:
    """dL_val / dT of one step of encoder and head down L_cls(D_tr) + gamma L_rec (eq. 5)."""
    own, present, start = leaves(own), leaves(weights), leaves(head)
    with sdpa_kernel(SDPBackend.MATH):
        classes = cross_entropy(model, present, pair(start), train, "mean")
        loss = classes + gamma * reconstruction(model, present, network, own, lower, normalise=normalise)
        moved, moved_head = descended(present, loss, encoder_rule), descended(start, loss, head_rule)
        answer = cross_entropy(model, moved, pair(moved_head), validation, "mean")
        gradients = torch.autograd.grad(answer, list(own.values()))
    return Found(dict(zip(own, gradients, strict=True)), held(moved), held(moved_head))


def fine_tuned(
    model: nn.Module,
    weights: Weights,
    tuned: Weights,
    network: nn.Module,
    own: Weights,
    head: Weights,
    *,
    lower: Masked,
    train: Batch,
    validation: Batch,
    encoder_rule: Rule,
    tuned_rule: Rule,
    head_rule: Rule,
    pull: float,
) -> Found:
    """dL_val / dT of E's step, and after it F's and the head's: F' = F - step(grad L_cls(F, C)) - pull (F - E')
    (eq. 13, pull = 2 eta lambda)."""
    own, present, second, start = leaves(own), leaves(weights), leaves(tuned), leaves(head)
    with sdpa_kernel(SDPBackend.MATH):
        moved = descended(present, reconstruction(model, present, network, own, lower), encoder_rule)
        classes = cross_entropy(model, second, pair(start), train, "mean")
        stepped, moved_head = descended(second, classes, tuned_rule), descended(start, classes, head_rule)
        pulled = {name: stepped[name] - pull * (second[name] - moved[name]) for name in second}
        answer = cross_entropy(model, pulled, pair(moved_head), validation, "mean")
        gradients = torch.autograd.grad(answer, list(own.values()))
    return Found(dict(zip(own, gradients, strict=True)), held(pulled), held(moved_head))
