"""The hypergradient of steps that are taken back: gradient descent as printed (MLO-MAE eq. 6-11, Algorithm 1).

At the start of a cycle the encoder is moved along what `unroll` steps of gradient descent would do on the very windows
that come next, and the head by one step from there. The masking network learns from the loss on D_val at that place;
then everything is where it was, and the cycle's real steps see the network's new masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.data.downstream import Downstream
from trp_scale.masks.clock import LevelClock
from trp_scale.masks.exact import whole
from trp_scale.masks.feedback import Choose, HeadFeedback, Lessons, on_device
from trp_scale.masks.hypergradient import SMALLEST, Reading
from trp_scale.masks.masks import MaskedWindow
from trp_scale.masks.second_level import HeadLevel


class Upcoming(Protocol):
    """A source of windows that can be looked at before they are due."""

    def peek(self, count: int) -> list[list[Batch]]: ...


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """One of the steps. Attributes: ctx: the step as hooks see it; window: its masks; place: where the weights were,
    as their distance from the present ones; None = there."""

    ctx: StepContext
    window: MaskedWindow
    place: Shards | None


class LookAhead(HeadFeedback):
    """The head's loss on D_val after steps that are taken back.

    Args:
        upcoming: D_u, whose next windows the steps are made on.
    """

    follows = False

    def __init__(
        self,
        config: Config,
        reading: Reading,
        clock: LevelClock,
        *,
        level: HeadLevel,
        sources: Downstream,
        upcoming: Upcoming,
    ) -> None:
        super().__init__(config, reading, clock, level=level, sources=sources)
        self.upcoming = upcoming

    def before_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        """The lesson was at the start of the cycle; there is nothing to keep."""

    def lessons(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Lessons:
        """None: the head learns as in any cycle."""
        self.update(ctx)
        return ()

    def lessons_ahead(self, ctx: StepContext, choose: Choose) -> Lessons:
        engine, rate = ctx.engine, self.settings.look_ahead_lr or ctx.lr
        with self.clock("look_ahead"):
            steps, place = self._unroll(ctx, choose, rate)
        with self.clock("validation"), _moved(engine, place):
            train = on_device(self.sources.train.peek(1)[0], ctx)
            validation = on_device(self.sources.validation.next_window(), ctx)
            take = partial(self.level.head.look_ahead, scale=self.scale(ctx))
            direction = self.followed(ctx, train, validation, take)
        self.direction_norm = direction.norm()
        self.response_norm = rate * self.direction_norm
        lessons = [self._lessons_of(steps[-1], direction.times(rate))]
        if self.exact.due():
            self._compare(steps[-1], place, lessons[0], rate)
        if self.settings.derivative == "full":
            for earlier, step in zip(reversed(steps[:-1]), reversed(steps), strict=False):
                direction = direction.plus(self._curvature(step, direction), -rate)
                lessons.append(self._lessons_of(earlier, direction.times(rate)))
        return [pair for each in lessons for pair in each]

    def _compare(self, step: Unrolled, end: Shards, lessons: Lessons, rate: float) -> None:
        """With the exact derivative of the last of the steps."""
        engine, present = step.ctx.engine, step.ctx.engine.weights()
        before = present if step.place is None else present.plus(step.place)
        places = (before, present.plus(end), present.times(0.0).shifted(rate))
        self.compare(step.ctx, step.window, lessons, *(whole(engine, place) for place in places))

    def _unroll(self, ctx: StepContext, choose: Choose, rate: float) -> tuple[list[Unrolled], Shards]:
        """The steps that the derivative goes through, and where they end."""
        windows = [ctx.window, *(on_device(each, ctx) for each in self.upcoming.peek(self.settings.unroll - 1))]
        steps: list[Unrolled] = []
        place: Shards | None = None
        for micros in windows:
            with _moved(ctx.engine, place):
                window = choose(ctx, micros)
                own = replace(ctx, window=micros, counts=window.counts, weights=None, sums=None)
                own.balancer.before_step(own)
                gradient = ctx.engine.gradient_of(_losses(own, micros))
            if self.settings.derivative == "last":
                steps.clear()
            steps.append(Unrolled(ctx=own, window=window, place=place))
            place = gradient.times(-rate) if place is None else place.plus(gradient, -rate)
        assert place is not None, "unroll is at least 1"
        return steps, place

    def _lessons_of(self, step: Unrolled, response: Shards) -> Lessons:
        with _moved(step.ctx.engine, step.place):
            return self.difference(step.ctx, step.window, response, None)

    def _curvature(self, step: Unrolled, direction: Shards) -> Shards:
        """The reconstruction's Hessian at a step, times a direction: one central difference of its gradient."""
        engine = step.ctx.engine
        reach = self.settings.difference / direction.norm().clamp(min=SMALLEST)

        def gradient(distance: Tensor) -> Shards:
            with engine.perturbed(direction, distance), engine.exact_forwards():
                return engine.gradient_of(_losses(step.ctx, step.window.micros))

        with _moved(engine, step.place):
            return gradient(reach).plus(gradient(-reach), -1.0).times(0.5 / reach)


def _losses(ctx: StepContext, micros: Sequence[Batch]) -> list[partial[Tensor]]:
    def loss(micro: Batch) -> Tensor:
        return ctx.balancer.total(ctx, ctx.losses_of(micro))

    return [partial(loss, micro) for micro in micros]


def _moved(engine: Engine, place: Shards | None) -> AbstractContextManager[None]:
    return nullcontext() if place is None else engine.perturbed(place, 1.0)
