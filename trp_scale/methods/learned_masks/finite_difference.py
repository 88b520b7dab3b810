"""dE' / dT by a central difference of two losses (MLO-MAE eq. 10, 12; A.2).

The masking network T enters the reconstruction loss through the masks' weights alone, so that for a direction v in the
encoder's weights

    d/dT <v, grad_E L_rec(E, T)> = sum_j (d weight_j / dT) d/ds (dL_rec / d weight_j)(E + s v),

and dL_rec / d weight_j is linear in the patches' errors: it needs no backward pass. Two forward passes, at E + s v and
at E - s v, give the sum. (The paper takes the difference of two gradients by T.) A selection with a derivative of its
own also has gates, and their derivative needs a backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.core.objective import PatchObjective, task_losses
from trp_scale.core.pieces import Shards
from trp_scale.methods.learned_masks.masks import MaskedWindow, MaskGradient

SMALLEST = 1e-30
"""A direction shorter than this counts as one of this length: the difference is then next to nothing, not NaN."""


class MaskDerivative(ABC):
    """dL_rec / d (weights, gates): the inner objective's derivative by a window's masks, at the encoder's weights that
    forwards read now.

    Args:
        objective: gives the patches' errors and their sums.
    """

    def __init__(self, objective: PatchObjective) -> None:
        self.objective = objective

    @abstractmethod
    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[MaskGradient]: ...

    @abstractmethod
    def leaves(self, window: MaskedWindow, index: int) -> tuple[Tensor, Tensor | None]:
        """Weights [B, M] and gates [B, V] of a micro-batch as the start of a graph, float64; no gates for a hard
        selection."""

    def inner_loss(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """The step's loss at the weights of its tasks, which are held."""
        assert ctx.weights is not None, "the balancer has set the weights of this step"
        return (ctx.weights / ctx.counts.clamp(min=1) * losses.sums).sum()

    def batch(self, ctx: StepContext, window: MaskedWindow, index: int, weights: Tensor, gate: Tensor | None) -> Batch:
        """A micro-batch as the model saw it, what other hooks have added included, with these weights and gates."""
        masked = window.with_weights(index, weights, gate)
        # Without a graph: an adversary's gradient is to come from the pass that trains the weights.
        added = {name: value.detach() for name, value in ctx.apply_hooks(window.micros[index]).extras.items()}
        return replace(masked, extras={**added, **masked.extras})


class HardMaskDerivative(MaskDerivative):
    """Derivative of a hard selection: one forward pass without a graph."""

    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[MaskGradient]:
        gradients = []
        for index in range(len(window.selections)):
            leaf, _ = self.leaves(window, index)
            batch = self.batch(ctx, window, index, leaf, None)
            with torch.no_grad(), ctx.engine.exact_forwards():
                errors = self.objective.errors(ctx.engine, batch)
            (slope,) = torch.autograd.grad(self.inner_loss(ctx, self.objective.losses(errors, batch)), leaf)
            gradients.append(MaskGradient(weights=slope))
        return gradients

    def leaves(self, window: MaskedWindow, index: int) -> tuple[Tensor, None]:
        return weights_leaf(window, index), None


class SoftMaskDerivative(MaskDerivative):
    """Derivative of a differentiable selection: a forward and a backward pass, whose gradient of the encoder is
    dropped."""

    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[MaskGradient]:
        engine = ctx.engine
        leaves: list[tuple[Tensor, Tensor]] = []

        def loss(index: int) -> Tensor:
            pair = self.leaves(window, index)
            leaves.append(pair)
            batch = self.batch(ctx, window, index, *pair)
            with engine.exact_forwards():
                return self.inner_loss(ctx, task_losses(self.objective, engine, batch))

        engine.compute_gradient([partial(loss, index) for index in range(len(window.micros))])
        # What the engine multiplied the loss by; its own reduction would add up rows that belong to one rank alone.
        unit = torch.ones((), dtype=torch.float64, device=engine.device)
        factor = engine.reduce_hook_gradient(unit) / engine.data_group.size
        gradients = []
        for weights, gate in leaves:
            assert weights.grad is not None and gate.grad is not None
            gradients.append(MaskGradient(weights=weights.grad * factor, gates=gate.grad * factor))
        return gradients

    def leaves(self, window: MaskedWindow, index: int) -> tuple[Tensor, Tensor]:
        weights = weights_leaf(window, index)
        return weights, torch.ones_like(window.selections[index].visible, dtype=weights.dtype).requires_grad_()


def weights_leaf(window: MaskedWindow, index: int) -> Tensor:
    """[B, M] float64: a micro-batch's weights, as the start of a graph."""
    return (window.selections[index].weights().double() * window.factor).detach().requires_grad_()


def finite_difference(
    derivative: MaskDerivative,
    ctx: StepContext,
    window: MaskedWindow,
    direction: Shards,
    *,
    length: float,
    base: Shards | None,
) -> list[MaskGradient]:
    """d/ds of a derivative at base + s direction, by one central difference (A.2).

    Args:
        direction: v, over all ranks.
        length: of the move to each side; s is length / ||v||.
        base: weights around which it is taken; None = the present ones.
    """
    epsilon = length / direction.norm().clamp(min=SMALLEST)
    with ctx.engine.perturb_weights(direction, epsilon, base=base) as move_to:
        above = derivative(ctx, window)
        move_to(-epsilon)
        below = derivative(ctx, window)
    return [high.plus(low, -1.0).times(0.5 / epsilon) for high, low in zip(above, below, strict=True)]
