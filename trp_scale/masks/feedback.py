"""What the masking network learns from, in the order of a cycle: `unroll` steps of the encoder, one update of the head,
and, each `every`-th time, one of the masking network (MLO-MAE 3.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.data.downstream import Downstream
from trp_scale.masks.clock import LevelClock
from trp_scale.masks.exact import ExactComparison, KnownStep, Weights, whole
from trp_scale.masks.head import HeadStep, TakeStep
from trp_scale.masks.hypergradient import Reading, along
from trp_scale.masks.masks import Lesson, MaskedWindow
from trp_scale.masks.second_level import HeadLevel

Lessons = Sequence[tuple[MaskedWindow, Sequence[Lesson]]]
"""What the network is taught from, window by window; empty where there is nothing to learn."""

Choose = Callable[[StepContext, Sequence[Batch]], MaskedWindow]
"""Masks for these micro-batches: what hooks and model see of them until the step itself begins."""


class Feedback:
    """One way of teaching the masking network; what it does not say does nothing.

    Args:
        config: settings of the run.
        reading: how the reconstruction depends on the masks.
        clock: counts the time of each level.
    Attributes:
        follows: its lessons are about the step that a cycle ends with, whose inputs of the network are then kept.
    """

    follows: bool = True

    def __init__(self, config: Config, reading: Reading, clock: LevelClock) -> None:
        self.config, self.settings = config, config.multilevel
        self.reading, self.clock = reading, clock

    def scale(self, ctx: StepContext) -> float:
        """The present learning rates as a share of their peaks: all levels have the weights' schedule."""
        return ctx.lr / self.config.optimizer.lr

    def lessons_ahead(self, ctx: StepContext, choose: Choose) -> Lessons:
        """At the start of a cycle with a lesson, before its first masks are chosen."""
        return ()

    def before_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        """Before the last step of a cycle with a lesson."""

    def counts(self, ctx: StepContext, window: MaskedWindow) -> Tensor:
        """[T] elements of each task in the global batch with these masks."""
        return window.counts

    def joined(self, ctx: StepContext, micro: Batch) -> Batch:
        """What the objective sees of a micro-batch that was joined to the window."""
        raise NotImplementedError(f"{type(self).__name__} joins no micro-batches to a window")

    def gradients(self, ctx: StepContext) -> None:
        """After the last backward of every step."""

    def stepped(self, ctx: StepContext) -> None:
        """After every step that was applied, before an update or a lesson."""

    def update(self, ctx: StepContext) -> None:
        """At the end of a cycle without a lesson."""

    def lessons(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Lessons:
        """At the end of a cycle with one.

        Args:
            window: the masks of the step that has just been made.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it teaches")

    def engines(self) -> Mapping[str, Engine]:
        """Engines of its own."""
        return {}

    def metrics(self) -> Mapping[str, Any]:
        """Values of the last update."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave."""


class Reconstruction(Feedback):
    """No labels: the network raises the reconstruction loss (the ablation without downstream feedback)."""

    def lessons(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Lessons:
        with self.clock("difference"):
            return [(window, [lesson.times(-1.0) for lesson in self.reading(ctx, window)])]


@dataclass(frozen=True, kw_only=True)
class LastUpdate:
    """What the last lesson came from. Attributes: head: the head's step; train, validation: micro-batches."""

    head: HeadStep
    train: list[Batch]
    validation: list[Batch]


class HeadFeedback(Feedback):
    """The head's loss on D_val, committed: the hypergradient is of the encoder's last step and of the head's (eq. 9).

    With u = response x dL_val / dE after that step, dL_val / dT = - d/dT <u, grad_E L_rec> at the weights before it.

    Args:
        level: the head.
        sources: D_tr and D_val.
    """

    def __init__(
        self, config: Config, reading: Reading, clock: LevelClock, *, level: HeadLevel, sources: Downstream
    ) -> None:
        super().__init__(config, reading, clock)
        self.level, self.sources = level, sources
        self.base: Shards | None = None
        self.direction_norm: Tensor | None = None
        self.response_norm: Tensor | None = None
        self.exact = ExactComparison(config)
        self.last: LastUpdate | None = None

    def before_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        self.base = ctx.engine.weights()

    def update(self, ctx: StepContext) -> None:
        with self.clock("head"):
            window = on_device(self.sources.train.next_window(), ctx)
            self.level.learn(ctx.engine, window, ctx.step, partial(self.level.head.descend, scale=self.scale(ctx)))

    def direction(self, ctx: StepContext) -> Shards:
        """The head's update, and dL_val / dE."""
        with self.clock("validation"):
            train = on_device(self.sources.train.next_window(), ctx)
            validation = on_device(self.sources.validation.next_window(), ctx)
            return self.followed(ctx, train, validation, partial(self.level.head.descend, scale=self.scale(ctx)))

    def followed(self, ctx: StepContext, train: list[Batch], validation: list[Batch], take: TakeStep) -> Shards:
        """dL_val / dE at the weights that forwards read now, after the head has stepped."""

        def noted(gradient: Tensor) -> HeadStep:
            step = take(gradient)
            self.note(LastUpdate(head=step, train=train, validation=validation))
            return step

        return self.level.direction(ctx.engine, train, validation, ctx.step, noted)

    def note(self, update: LastUpdate) -> None:
        """Keep what a lesson comes from until it has been compared."""
        self.last = update if self.exact.every > 0 else None

    def lessons(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Lessons:
        engine, respond = ctx.engine, partial(ctx.engine.step_response, lr=stats.lr, grad_norm=stats.grad_norm)
        base, self.base = self.base, None
        assert base is not None, "the weights before the step were kept"
        direction = self.direction(ctx)
        self.direction_norm = direction.norm()
        direction = respond(direction)
        self.response_norm = direction.norm()
        lessons = self.difference(ctx, window, direction, base)
        if self.exact.due():
            places = (base, engine.weights(), respond(base.times(0.0).shifted(1.0)))  # base is back but for rounding
            self.compare(ctx, window, lessons, *(whole(engine, place) for place in places))
        return lessons

    def compare(
        self,
        ctx: StepContext,
        window: MaskedWindow,
        lessons: Lessons,
        before: Weights,
        after: Weights,
        response: Weights,
    ) -> None:
        """Take note of how well these lessons agree with the exact derivative of one step; see KnownStep."""
        assert self.last is not None, "the head has stepped"
        known = KnownStep(
            before=before,
            after=after,
            response=response,
            head=self.last.head,
            train=self.last.train,
            validation=self.last.validation,
            number=ctx.step,
        )
        self.last = None
        ((_, found),) = lessons
        self.exact.compare(ctx, self.reading, self.level, window, found, known)

    def difference(self, ctx: StepContext, window: MaskedWindow, direction: Shards, base: Shards | None) -> Lessons:
        """Lessons by which L_val falls."""
        with self.clock("difference"):
            found = along(self.reading, ctx, window, direction, difference=self.settings.difference, base=base)
            return [(window, [lesson.times(-1.0) for lesson in found])]

    def metrics(self) -> Mapping[str, Any]:
        """head_loss, validation_loss: means over the last batches; direction_norm: |dL_val / dE|; response_norm: the
        same times the step's response; exact_cosine, exact_norm_ratio: of the last comparison."""
        return {
            "head_loss": self.level.train_loss,
            "validation_loss": self.level.validation_loss,
            "direction_norm": self.direction_norm,
            "response_norm": self.response_norm,
            "exact_cosine": self.exact.cosine,
            "exact_norm_ratio": self.exact.norm_ratio,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"head": self.level.head.state_dict(), "asked": self.exact.asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level.head.load_state_dict(state["head"])
        self.exact.asked = int(state["asked"])


def on_device(window: Sequence[Batch], ctx: StepContext) -> list[Batch]:
    """The micro-batches where the engine computes."""
    return [micro.to(ctx.engine.device) for micro in window]
