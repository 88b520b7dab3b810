"""How far the hypergradient is from the exact one: automatic differentiation in float64 on whole weights.

For looking at small models now and then: every rank gathers all weights and differentiates twice. What is compared is
dL_val / d (weights, gates) of the window's masks, of which the masking network's gradient is a linear image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.masks.head import HeadStep, global_sum
from trp_scale.masks.hypergradient import Reading
from trp_scale.masks.masks import Lesson, MaskedWindow
from trp_scale.masks.second_level import HeadLevel
from trp_scale.upstreams.mae.model import MaskedAutoencoder

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class KnownStep:
    """A step of the encoder and of the head.

    Attributes:
        before, after: the encoder's weights, whole and in float64.
        response: derivative of the encoder's descent by its gradient, element by element.
        head: the head's step.
        train, validation: this rank's micro-batches of D_tr and D_val.
        number: of the run's step.
    """

    before: Weights
    after: Weights
    response: Weights
    head: HeadStep
    train: Sequence[Batch]
    validation: Sequence[Batch]
    number: int


class ExactComparison:
    """Compares lessons with exact ones, each `multilevel.exact_every`-th time.

    Args:
        config: settings of the run.
    Attributes:
        cosine, norm_ratio: ours to the exact one in the last comparison; None before it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.every = config.multilevel.exact_every
        self.asked = 0
        self.cosine: Tensor | None = None
        self.norm_ratio: Tensor | None = None
        self._module: nn.Module | None = None

    def due(self) -> bool:
        """Whether this lesson is to be compared; to be asked once for each."""
        self.asked += self.every > 0
        return self.every > 0 and self.asked % self.every == 0

    def compare(
        self,
        ctx: StepContext,
        reading: Reading,
        level: HeadLevel,
        window: MaskedWindow,
        lessons: Sequence[Lesson],
        step: KnownStep,
    ) -> None:
        """Take note of how well these lessons agree; all ranks call it together.

        Args:
            lessons: the derivative of L_val that was found, by micro-batch of this rank.
            step: what it is the derivative of.
        """
        if self._module is None:
            self._module = MaskedAutoencoder(self.config).double().to(ctx.engine.device)
        forward = partial(_forward, self._module)
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            direction = _direction(ctx, level, forward, step)
            exact = _lessons(ctx, reading, window, forward, step, direction)
        ours = torch.cat([part.reshape(-1).double() for lesson in lessons for part in lesson.parts()])
        theirs = torch.cat([part.reshape(-1) for lesson in exact for part in lesson.parts()])
        across, own, other = ctx.data_group.sum(torch.stack([ours @ theirs, ours @ ours, theirs @ theirs]))
        self.cosine, self.norm_ratio = across / (own * other).sqrt(), (own / other).sqrt()


def _forward(module: nn.Module, weights: Weights) -> Callable[..., Any]:
    return lambda *arguments, **named: functional_call(module, weights, arguments, named)


def _direction(
    ctx: StepContext, level: HeadLevel, forward: Callable[[Weights], Callable[..., Any]], step: KnownStep
) -> Weights:
    """dL_val / dE after the step, by both paths, over all ranks."""
    weights = {name: value.clone().requires_grad_() for name, value in step.after.items()}
    engine: Any = forward(weights)

    def parts(window: Sequence[Batch], *, learning: bool) -> list[Any]:
        batches = [(micro, level.features(engine, [micro])[0].double()) for micro in window]
        return [level.labelled(each, micro, learning=learning, step=step.number) for micro, each in batches]

    learned, asked = parts(step.train, learning=True), parts(step.validation, learning=False)
    counts = [torch.stack([part.weights.sum() for part in each]).sum() for each in (learned, asked)]
    rows_train, rows = (count.clamp(min=1) for count in global_sum(ctx.data_group, counts))
    start = step.head.before.flat().double().requires_grad_()
    loss = torch.stack([level.loss(part, step.head.before.like(start)) for part in learned]).sum() / rows_train
    (gradient,) = torch.autograd.grad(loss, start, create_graph=True)
    moved = step.head.parameters.flat().double().requires_grad_()
    answer = torch.stack([level.loss(part, step.head.parameters.like(moved)) for part in asked]).sum() / rows
    own, of_head = _gradients(answer, weights), torch.autograd.grad(answer, moved, retain_graph=True)[0]
    (of_head,) = global_sum(ctx.data_group, [of_head])
    path = _gradients(-(step.head.response.double() * of_head * gradient).sum(), weights)
    summed = global_sum(ctx.data_group, [own[name] + path[name] for name in weights])
    return dict(zip(weights, summed, strict=True))


def _lessons(
    ctx: StepContext,
    reading: Reading,
    window: MaskedWindow,
    forward: Callable[[Weights], Callable[..., Any]],
    step: KnownStep,
    direction: Weights,
) -> list[Lesson]:
    """- d <response x direction, grad_E L_rec> / d (weights, gates) before the step."""
    weights = {name: value.clone().requires_grad_() for name, value in step.before.items()}
    leaves = [reading.leaves(window, place) for place in range(len(window.selections))]
    losses = [
        reading.total(ctx, reading.objective(forward(weights), reading.seen(ctx, window, place, *pair)))
        for place, pair in enumerate(leaves)
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
    found = iter(torch.autograd.grad(slope, [leaf for pair in leaves for leaf in pair if leaf is not None]))
    return [Lesson(of_weights=next(found), of_gate=None if gate is None else next(found)) for _, gate in leaves]


def _gradients(loss: Tensor, weights: Weights) -> Weights:
    found = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, allow_unused=True)
    pairs = zip(weights.items(), found, strict=True)
    return {name: torch.zeros_like(weight) if each is None else each for (name, weight), each in pairs}


def whole(engine: Engine, shards: Shards) -> Weights:
    """Every parameter's part of a vector, whole and in float64, on every rank."""
    mine = [
        (piece.name, piece.shape, piece.start, part.detach().double().cpu())
        for piece, part in zip(engine.pieces(), shards.parts, strict=True)
        if piece.owner
    ]
    found: Weights = {}
    for name, shape, start, part in (each for rank in engine.data_group.gather_objects(mine) for each in rank):
        target = found.setdefault(name, torch.empty(shape, dtype=torch.float64))
        target.view(-1)[start : start + part.numel()] = part
    return {name: value.to(engine.device) for name, value in found.items()}
