"""dE' / dT by a central difference of two losses (MLO-MAE eq. 10, 12; A.2), and its comparison with the exact value.

The masking network T enters the reconstruction loss only through the weights of the masks. So for a direction v in the
encoder's weights

    d/dT <v, grad_E L_rec(E, T)> = sum_j (d weight_j / dT) d/ds (dL_rec / d weight_j)(E + s v).

dL_rec / d weight_j is linear in the errors of the patches, so two forward passes, at E + s v and at E - s v, give the
sum without a backward pass. (The paper computes the difference of two gradients by T.) A selection that is not hard
also has gates, whose derivative needs a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards, whole_tensors
from trp_scale.core.run import PatchObjective, RunContext, task_losses
from trp_scale.methods.learned_masks.head import HeadLevel, HeadStep, global_sum, row_count
from trp_scale.methods.learned_masks.masks import MaskedWindow, MaskFactors, masked_config

SMALLEST = 1e-30
"""Lower bound of the length of a direction; avoids NaN for a direction of 0."""


class MaskDerivative:
    """dL_rec / d (weights, gates): derivative of the inner objective by the masks of a window, at the encoder weights
    that forwards read now.

    Args:
        hard: the selection is hard, without gates.
    """

    def __init__(self, objective: PatchObjective, *, hard: bool) -> None:
        self.objective, self.hard = objective, hard

    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[MaskFactors]:
        """Return the derivative for each micro-batch. A hard selection needs one forward pass without a graph, others a
        forward and a backward pass, which discards the gradient of the encoder."""
        engine, leaves = ctx.engine, self.leaves(window)
        if self.hard:
            slopes = []
            for index, leaf in enumerate(leaves):
                batch = self.batch(ctx, window, index, leaf)
                with torch.no_grad(), engine.exact_forwards():
                    errors = self.objective.errors(engine, batch)
                losses = self.inner_loss(ctx, self.objective.losses(errors, batch))
                slopes.append(MaskFactors.from_parts(torch.autograd.grad(losses, leaf.weights)))
            return slopes

        def loss(index: int) -> Tensor:
            with engine.exact_forwards():
                batch = self.batch(ctx, window, index, leaves[index])
                return self.inner_loss(ctx, task_losses(self.objective, engine, batch))

        engine.compute_gradient([partial(loss, index) for index in range(len(leaves))])
        # Inverse of the engine's loss factor. The gradients themselves are not reduced: their rows belong to one rank.
        unit = torch.ones((), dtype=torch.float64, device=engine.device)
        factor = engine.reduce_hook_gradient(unit) / engine.data_group.size
        return [MaskFactors.from_parts(part.grad * factor for part in leaf.parts()) for leaf in leaves]  # type: ignore[operator]

    def leaves(self, window: MaskedWindow) -> list[MaskFactors]:
        """Return the factors of each micro-batch as float64 leaves of a graph."""
        leaves = []
        for selection in window.selections:
            weights = (selection.weights().double() * window.factor).detach().requires_grad_()
            gates = None if self.hard else torch.ones_like(selection.visible, dtype=weights.dtype).requires_grad_()
            leaves.append(MaskFactors(weights=weights, gates=gates))
        return leaves

    def inner_loss(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """Return the loss of the step with constant task weights."""
        assert ctx.weights is not None, "the balancer sets the weights of this step"
        return (ctx.weights / ctx.counts.clamp(min=1) * losses.sums).sum()

    def batch(self, ctx: StepContext, window: MaskedWindow, index: int, factors: MaskFactors) -> Batch:
        """Return a micro-batch as the model saw it, including the extras of other hooks, with these factors."""
        masked = window.with_factors(index, factors)
        # Detached: the gradient of an adversary comes only from the pass that trains the weights.
        added = {name: value.detach() for name, value in ctx.apply_hooks(window.micros[index]).extras.items()}
        return replace(masked, extras={**added, **masked.extras})


def finite_difference(
    derivative: MaskDerivative,
    ctx: StepContext,
    window: MaskedWindow,
    direction: Shards,
    *,
    length: float,
    base: Shards | None,
) -> list[MaskFactors]:
    """Return d/ds of a derivative at base + s direction by one central difference (A.2).

    Args:
        direction: v, over all ranks.
        length: length of the move in each direction; s is length / ||v||.
        base: centre of the difference; `None` = the current weights.
    """
    epsilon = length / direction.norm().clamp(min=SMALLEST)
    with ctx.engine.perturb_weights(direction, epsilon, base=base) as move_to:
        above = derivative(ctx, window)
        move_to(-epsilon)
        below = derivative(ctx, window)
    return [high.plus(low, -1.0).times(0.5 / epsilon) for high, low in zip(above, below, strict=True)]


Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadUpdate:
    """Step of the head, and this rank's micro-batches of D_tr and D_val that a hypergradient was computed from."""

    head: HeadStep
    train: Sequence[Batch]
    validation: Sequence[Batch]


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """An inner step and the head step after it.

    Attributes:
        before, after: E and E', unsharded, float64.
        response: elementwise derivative of E - E' by the gradient.
    """

    before: Weights
    after: Weights
    response: Weights
    update: HeadUpdate


class ExactComparison:
    """Compares every `multilevel.exact_every`-th hypergradient with the exact one, from automatic differentiation in
    float64 on unsharded weights.

    For small models only: every rank gathers all weights and differentiates twice. It compares dL_val / d (weights,
    gates) of the window's masks; the gradient of the masking network is a linear function of these.

    Attributes:
        number: number of hypergradients.
        cosine, norm_ratio: between the approximate and the exact one in the last comparison; `None` before it.
    """

    def __init__(self, run: RunContext) -> None:
        self.make_model = run.make_model
        self.every: int = masked_config(run).multilevel.exact_every
        self.number = 0
        self.cosine: Tensor | None = None
        self.norm_ratio: Tensor | None = None
        self._module: nn.Module | None = None

    def due(self) -> bool:
        """Return whether to compare this hypergradient; call it once per hypergradient."""
        self.number += self.every > 0
        return self.every > 0 and self.number % self.every == 0

    def compare(
        self,
        ctx: StepContext,
        derivative: MaskDerivative,
        level: HeadLevel,
        window: MaskedWindow,
        approximate: Sequence[MaskFactors],
        step: WholeStep,
    ) -> None:
        """Compare a hypergradient with the exact one; collective over all ranks.

        Args:
            approximate: the hypergradient for each micro-batch of this rank.
            step: the step that it differentiates.
        """
        if self._module is None:
            assert self.make_model is not None, "the run can make a second model"
            self._module = self.make_model().double().to(ctx.engine.device)
        forward = partial(_forward, self._module)
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            direction = _encoder_gradient(ctx, level, forward, step)
            exact = _hypergradient(ctx, derivative, window, forward, step, direction)
        ours = torch.cat([part.reshape(-1).double() for gradient in approximate for part in gradient.parts()])
        theirs = torch.cat([part.reshape(-1) for gradient in exact for part in gradient.parts()])
        across, ours_squared, other = ctx.data_group.sum(torch.stack([ours @ theirs, ours @ ours, theirs @ theirs]))
        self.cosine, self.norm_ratio = across / (ours_squared * other).sqrt(), (ours_squared / other).sqrt()


def _forward(module: nn.Module, weights: Weights) -> Callable[..., Any]:
    return lambda *arguments, **named: functional_call(module, weights, arguments, named)


def _encoder_gradient(
    ctx: StepContext, level: HeadLevel, forward: Callable[[Weights], Callable[..., Any]], step: WholeStep
) -> Weights:
    """Return dL_val / dE' by both paths (eq. 9), summed over all ranks."""
    weights = {name: value.clone().requires_grad_() for name, value in step.after.items()}
    engine: Any = forward(weights)

    def parts(window: Sequence[Batch], *, learning: bool) -> list[Any]:
        batches = [(micro, level.features(engine, [micro])[0].double()) for micro in window]
        return [level.head_input(batch, micro, learning=learning, step=ctx.step) for micro, batch in batches]

    head, update = level.head, step.update
    train, validation = parts(update.train, learning=True), parts(update.validation, learning=False)
    counts = [row_count(inputs) for inputs in (train, validation)]
    rows_train, rows = (count.clamp(min=1) for count in global_sum(ctx.data_group, counts))
    start = update.head.before.flat().double().requires_grad_()
    loss = torch.stack([head.loss(part, update.head.before.like(start)) for part in train]).sum() / rows_train
    (gradient,) = torch.autograd.grad(loss, start, create_graph=True)
    moved = update.head.parameters.flat().double().requires_grad_()
    outer = torch.stack([head.loss(part, update.head.parameters.like(moved)) for part in validation]).sum() / rows
    direct, by_head = _gradients(outer, weights), torch.autograd.grad(outer, moved, retain_graph=True)[0]
    (by_head,) = global_sum(ctx.data_group, [by_head])
    path = _gradients(-(update.head.response.double() * by_head * gradient).sum(), weights)
    summed = global_sum(ctx.data_group, [direct[name] + path[name] for name in weights])
    return dict(zip(weights, summed, strict=True))


def _hypergradient(
    ctx: StepContext,
    derivative: MaskDerivative,
    window: MaskedWindow,
    forward: Callable[[Weights], Callable[..., Any]],
    step: WholeStep,
    direction: Weights,
) -> list[MaskFactors]:
    """Return - d <response x direction, grad_E L_rec> / d (weights, gates) before the step (eq. 10)."""
    weights = {name: value.clone().requires_grad_() for name, value in step.before.items()}
    leaves = derivative.leaves(window)
    losses = [
        derivative.inner_loss(ctx, derivative.objective(forward(weights), derivative.batch(ctx, window, index, leaf)))
        for index, leaf in enumerate(leaves)
    ]
    gradients = torch.autograd.grad(
        torch.stack(losses).sum(), list(weights.values()), create_graph=True, allow_unused=True
    )
    slope = torch.stack(
        [
            -(step.response[name] * direction[name] * gradient).sum()
            for name, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
        ]
    ).sum()
    derivatives = iter(torch.autograd.grad(slope, [part for leaf in leaves for part in leaf.parts()]))
    return [MaskFactors.from_parts([next(derivatives) for _ in leaf.parts()]) for leaf in leaves]


def _gradients(loss: Tensor, weights: Weights) -> Weights:
    gradients = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, allow_unused=True)
    pairs = zip(weights.items(), gradients, strict=True)
    return {name: torch.zeros_like(weight) if gradient is None else gradient for (name, weight), gradient in pairs}


def whole(engine: Engine, shards: Shards) -> Weights:
    """Return an unsharded float64 copy of a vector by parameter name, on every rank."""
    tensors = whole_tensors(engine.pieces(), (part.double() for part in shards.parts), shards.group)
    return {name: value.to(engine.device) for name, value in tensors.items()}
