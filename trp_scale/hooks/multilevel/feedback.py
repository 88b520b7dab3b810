"""What the masking network learns from, in the order of a cycle: `unroll` steps of the encoder, one update of the head,
and, each `every`-th time, one of the masking network (MLO-MAE 3.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trp_scale.batch import Batch, StepStats
from trp_scale.config import Config
from trp_scale.data.downstream import Downstream
from trp_scale.engines.base import Engine
from trp_scale.engines.shards import Shards
from trp_scale.hooks.base import StepContext
from trp_scale.hooks.multilevel.clock import LevelClock
from trp_scale.hooks.multilevel.hypergradient import Reading, along
from trp_scale.hooks.multilevel.masks import Lesson, MaskedWindow
from trp_scale.hooks.multilevel.second_level import HeadLevel

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
    """

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
        self.direction_norm = self.response_norm = torch.tensor(torch.nan)

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
            take = partial(self.level.head.descend, scale=self.scale(ctx))
            return self.level.direction(ctx.engine, train, validation, ctx.step, take)

    def lessons(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Lessons:
        direction = self.direction(ctx)
        self.direction_norm = direction.norm()
        direction = ctx.engine.step_response(direction, lr=stats.lr, grad_norm=stats.grad_norm)
        self.response_norm = direction.norm()
        base, self.base = self.base, None
        return self.difference(ctx, window, direction, base)

    def difference(self, ctx: StepContext, window: MaskedWindow, direction: Shards, base: Shards | None) -> Lessons:
        """Lessons by which L_val falls."""
        with self.clock("difference"):
            found = along(self.reading, ctx, window, direction, difference=self.settings.difference, base=base)
            return [(window, [lesson.times(-1.0) for lesson in found])]

    def metrics(self) -> Mapping[str, Any]:
        """head_loss, validation_loss: means over the last batches; direction_norm: |dL_val / dE|; response_norm: the
        same times the step's response."""
        return {
            "head_loss": self.level.train_loss,
            "validation_loss": self.level.validation_loss,
            "direction_norm": self.direction_norm,
            "response_norm": self.response_norm,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"head": self.level.head.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level.head.load_state_dict(state["head"])


def on_device(window: Sequence[Batch], ctx: StepContext) -> list[Batch]:
    """The micro-batches where the engine computes."""
    return [micro.to(ctx.engine.device) for micro in window]
