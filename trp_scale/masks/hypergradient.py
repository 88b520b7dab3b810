"""How the lower step's loss depends on the masks, and how that changes along a direction of the weights.

The masking network T enters the reconstruction loss through the masks' weights alone, so that

    d/dT <u, grad_E L_rec(E, T)> = sum_j (d weight_j / dT) d/ds (dL_rec / d weight_j)(E + s u),

and dL_rec / d weight_j, linear in the patches' errors, needs no backward pass (algorithms.md, section 3; MLO-MAE eq.
10, A.2). With a choice that has a derivative of its own the gates take part, and theirs needs one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.core.objective import PatchObjective
from trp_scale.core.pieces import Shards
from trp_scale.masks.masks import Lesson, MaskedWindow

SMALLEST = 1e-30
"""A direction shorter than this counts as one of this length: it then teaches next to nothing, instead of NaN."""


class Reading(ABC):
    """dL_rec / d (weights, gates) of a window at the weights that forwards read now.

    Args:
        objective: gives the patches' errors and their sums.
    """

    def __init__(self, objective: PatchObjective) -> None:
        self.objective = objective

    @abstractmethod
    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[Lesson]: ...

    @abstractmethod
    def leaves(self, window: MaskedWindow, place: int) -> tuple[Tensor, Tensor | None]:
        """Weights [B, M] and gates [B, V] of a micro-batch as the start of a graph, float64; no gates for a hard
        choice."""

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """The step's loss at the weights of its tasks, which are held."""
        assert ctx.weights is not None, "the balancer has set the weights of this step"
        return (ctx.weights / ctx.counts.clamp(min=1) * losses.sums).sum()

    def seen(self, ctx: StepContext, window: MaskedWindow, place: int, weights: Tensor, gate: Tensor | None) -> Batch:
        """A micro-batch as the model saw it, what other hooks have added included, with these weights and gates."""
        own = window.weighted(place, weights, gate)
        # Without a graph: an adversary's gradient is to come from the pass that trains the weights.
        added = {name: value.detach() for name, value in ctx.batch_of(window.micros[place]).extras.items()}
        return replace(own, extras={**added, **own.extras})


class HardReading(Reading):
    """For a hard choice: one forward pass without a graph."""

    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[Lesson]:
        lessons = []
        for place in range(len(window.selections)):
            leaf, _ = self.leaves(window, place)
            batch = self.seen(ctx, window, place, leaf, None)
            with torch.no_grad(), ctx.engine.exact_forwards():
                errors = self.objective.errors(ctx.engine, batch)
            (slope,) = torch.autograd.grad(self.total(ctx, self.objective.losses(errors, batch)), leaf)
            lessons.append(Lesson(of_weights=slope))
        return lessons

    def leaves(self, window: MaskedWindow, place: int) -> tuple[Tensor, None]:
        return weights_leaf(window, place), None


class SoftReading(Reading):
    """For a choice that has a derivative: a forward and a backward pass, of which only the gates' part is kept."""

    def __call__(self, ctx: StepContext, window: MaskedWindow) -> list[Lesson]:
        engine = ctx.engine
        leaves: list[tuple[Tensor, Tensor]] = []

        def loss(place: int) -> Tensor:
            pair = self.leaves(window, place)
            leaves.append(pair)
            batch = self.seen(ctx, window, place, *pair)
            with engine.exact_forwards():
                return self.total(ctx, self.objective(engine, batch))

        engine.gradient_of([partial(loss, place) for place in range(len(window.micros))])
        # What the engine multiplied the loss by; its own reduction would add up rows that belong to one rank alone.
        one = torch.ones((), dtype=torch.float64, device=engine.device)
        factor = engine.reduce_hook_gradient(one) / engine.data_group.size
        lessons = []
        for weights, gate in leaves:
            assert weights.grad is not None and gate.grad is not None
            lessons.append(Lesson(of_weights=weights.grad * factor, of_gate=gate.grad * factor))
        return lessons

    def leaves(self, window: MaskedWindow, place: int) -> tuple[Tensor, Tensor]:
        weights = weights_leaf(window, place)
        return weights, torch.ones_like(window.selections[place].visible, dtype=weights.dtype).requires_grad_()


def weights_leaf(window: MaskedWindow, place: int) -> Tensor:
    """[B, M] float64: a micro-batch's weights, as the start of a graph."""
    return (window.selections[place].weights().double() * window.factor).detach().requires_grad_()


def along(
    reading: Reading,
    ctx: StepContext,
    window: MaskedWindow,
    direction: Shards,
    *,
    difference: float,
    base: Shards | None,
) -> list[Lesson]:
    """d/ds of a reading at base + s direction, by one central difference.

    Args:
        difference: length of the step to each side.
        base: weights around which it is taken; None = the present ones.
    """
    reach = difference / direction.norm().clamp(min=SMALLEST)
    with ctx.engine.perturbed(direction, reach, base=base):
        above = reading(ctx, window)
    with ctx.engine.perturbed(direction, -reach, base=base):
        below = reading(ctx, window)
    return [high.plus(low, -1.0).times(0.5 / reach) for high, low in zip(above, below, strict=True)]
