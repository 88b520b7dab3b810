"""The hypergradient of unrolled steps that are taken back: gradient descent as printed (MLO-MAE eq. 6-11,
Algorithm 1).

At the start of a cycle the encoder is moved along `unroll` inner steps of gradient descent, on the very windows that
come next, and the head by one step from there. The outer step is down the loss on D_val at that place. Then everything
is where it was, and the cycle's real steps see the network's new masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.core.run import RunContext
from trp_scale.methods.learned_masks.exact import whole
from trp_scale.methods.learned_masks.finite_difference import SMALLEST, MaskDerivative
from trp_scale.methods.learned_masks.hypergradient import Choose, Clock, ValidationLoss, on_device
from trp_scale.methods.learned_masks.masks import Hypergradient, MaskedWindow
from trp_scale.methods.learned_masks.settings import HeadSettings


class Peekable(Protocol):
    """A source of windows that can be looked at before they are due."""

    def peek(self, count: int) -> list[list[Batch]]: ...


@dataclass(frozen=True, kw_only=True)
class InnerStep:
    """One of the unrolled steps. Attributes: ctx: the step as hooks see it; window: its masks; place: where the weights
    were, as their distance from the present ones; None = there."""

    ctx: StepContext
    window: MaskedWindow
    place: Shards | None


class UnrolledValidationLoss(ValidationLoss):
    """L_val after unrolled steps that are taken back.

    Attributes:
        upcoming: D_u, whose next windows the steps are made on.
    """

    of_last_step = False
    settings: HeadSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        self.upcoming: Peekable = run.sources.train

    def before_last_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        """The outer step was at the start of the cycle; there is nothing to keep."""

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        """None: the head learns as in any cycle."""
        self.head_step(ctx)
        return ()

    def unrolled_gradient(self, ctx: StepContext, choose: Choose) -> Hypergradient:
        engine, rate = ctx.engine, self.settings.look_ahead_lr or ctx.lr
        with self.clock("look_ahead"):
            steps, end = self._unroll(ctx, choose, rate)
        with self.clock("validation"), _offset_weights(engine, end):
            train = on_device(self.sources.train.peek(1)[0], ctx)
            validation = on_device(self.sources.validation.next_window(), ctx)
            rule = partial(self.level.head.gradient_step, scale=self.scale(ctx))
            direction = self.both_paths(ctx, train, validation, rule)
        self.direction_norm = direction.norm()
        self.response_norm = rate * self.direction_norm
        results = [self._through(steps[-1], direction.times(rate))]
        if self.exact.due():
            self._compare(steps[-1], end, results[0], rate)
        if self.settings.derivative == "full":
            for earlier, step in zip(reversed(steps[:-1]), reversed(steps), strict=False):
                # dE_{k+1} / dE_k = 1 - eta_E Hessian
                direction = direction.plus(self._hessian_product(step, direction), -rate)
                results.append(self._through(earlier, direction.times(rate)))
        return [pair for pairs in results for pair in pairs]

    def _compare(self, step: InnerStep, end: Shards, approximate: Hypergradient, rate: float) -> None:
        """Compare with the exact hypergradient of the last of the steps."""
        engine, present = step.ctx.engine, step.ctx.engine.weights()
        before = present if step.place is None else present.plus(step.place)
        places = (before, present.plus(end), present.times(0.0).shift(rate))
        self.compare(step.ctx, step.window, approximate, *(whole(engine, shards) for shards in places))

    def _unroll(self, ctx: StepContext, choose: Choose, rate: float) -> tuple[list[InnerStep], Shards]:
        """The steps that the derivative goes through, and where they end (eq. 6)."""
        windows = [ctx.window, *(on_device(later, ctx) for later in self.upcoming.peek(self.settings.unroll - 1))]
        steps: list[InnerStep] = []
        offset: Shards | None = None
        for micros in windows:
            with _offset_weights(ctx.engine, offset):
                window = choose(ctx, micros)
                inner_ctx = ctx.separate_context(micros, window.counts)
                inner_ctx.balancer.before_step(inner_ctx)
                gradient = ctx.engine.compute_gradient(_losses(inner_ctx, micros))
            if self.settings.derivative == "last":
                steps.clear()
            steps.append(InnerStep(ctx=inner_ctx, window=window, place=offset))
            offset = gradient.times(-rate) if offset is None else offset.plus(gradient, -rate)
        assert offset is not None, "unroll is at least 1"
        return steps, offset

    def _through(self, step: InnerStep, direction: Shards) -> Hypergradient:
        with _offset_weights(step.ctx.engine, step.place):
            return self.through_inner_step(step.ctx, step.window, direction, None)

    def _hessian_product(self, step: InnerStep, direction: Shards) -> Shards:
        """The reconstruction's Hessian at a step, times a direction: one central difference of its gradient."""
        engine = step.ctx.engine
        epsilon = self.settings.difference / direction.norm().clamp(min=SMALLEST)

        losses = _losses(step.ctx, step.window.micros)
        with (
            _offset_weights(engine, step.place),
            engine.perturb_weights(direction, epsilon) as move_to,
            engine.exact_forwards(),
        ):
            above = engine.compute_gradient(losses)
            move_to(-epsilon)
            return above.plus(engine.compute_gradient(losses), -1.0).times(0.5 / epsilon)


def _losses(ctx: StepContext, micros: Sequence[Batch]) -> list[partial[Tensor]]:
    def loss(micro: Batch) -> Tensor:
        return ctx.balancer.total(ctx, ctx.compute_losses(micro))

    return [partial(loss, micro) for micro in micros]


def _offset_weights(engine: Engine, offset: Shards | None) -> AbstractContextManager[Any]:
    return nullcontext() if offset is None else engine.perturb_weights(offset, 1.0)
