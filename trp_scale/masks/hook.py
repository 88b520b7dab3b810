"""Masks learned from a downstream task, as a hook on any engine (MLO-MAE; algorithms.md, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.masks.clock import LevelClock
from trp_scale.masks.feedback import Feedback, Lessons
from trp_scale.masks.masks import MaskedWindow, MaskTeacher

NETWORK = "masking_network"
"""Name of the masking network's engine, and prefix of its tensors in a checkpoint."""


class LearnedMasks(Hook):
    """Level I sees the masks that the network chooses; at the end of a cycle the head, and then the network, learn.

    It must come before hooks that perturb what the model sees: their passes have these masks, and it reads what they
    added before they move on.

    Args:
        config: settings of the run.
        teacher: the masking network.
        feedback: what it learns from.
        clock: counts the time of each level.
    """

    name = "multilevel"

    def __init__(self, config: Config, teacher: MaskTeacher, feedback: Feedback, clock: LevelClock) -> None:
        self.config, self.settings = config, config.multilevel
        self.teacher, self.feedback, self.clock = teacher, feedback, clock
        self.steps = 0
        self.updates = 0
        self.lessons = 0
        self.looked_ahead = False
        self.window: MaskedWindow | None = None
        self.masked: dict[int, MaskedWindow] = {}

    @property
    def ends_cycle(self) -> bool:
        """Whether the head learns after this step."""
        return self.steps == self.settings.unroll - 1

    @property
    def teaches(self) -> bool:
        """Whether the masking network learns after this step."""
        return self.ends_cycle and self.updates == self.settings.every - 1

    def before_step(self, ctx: StepContext) -> None:
        if self.updates == self.settings.every - 1 and not self.looked_ahead:
            self._teach(ctx, self.feedback.lessons_ahead(ctx, self.choose))
            self.looked_ahead = True
        self.masked = {}
        window = self.window = self.choose(ctx, ctx.own_window, keep=self.teaches and self.feedback.follows)
        ctx.counts = self.feedback.counts(ctx, window)
        if self.teaches:
            self.feedback.before_step(ctx, window)

    def choose(self, ctx: StepContext, micros: Sequence[Batch], *, keep: bool = True) -> MaskedWindow:
        """Masks for these micro-batches: what they look like from now on."""
        with self.clock("masks"):
            window = self.teacher.choose(ctx.engine, micros, ctx.step, keep=keep)
        self.masked |= {micro.start: window for micro in micros}
        return window

    def _teach(self, ctx: StepContext, lessons: Lessons) -> None:
        if not lessons:
            return
        with self.clock("network"):
            self.lessons += self.teacher.teach(lessons, self.feedback.scale(ctx))

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        if micro.joined:
            return self.feedback.joined(ctx, micro)
        return self.masked[micro.start].batch(micro)

    def gradients(self, ctx: StepContext) -> None:
        self.feedback.gradients(ctx)

    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        if not stats.applied:
            return
        assert self.window is not None, "masks are chosen before the step"
        self.feedback.stepped(ctx)
        ends, teaches = self.ends_cycle, self.teaches
        if teaches:
            self._teach(ctx, self.feedback.lessons(ctx, stats, self.window))
        elif ends:
            self.feedback.update(ctx)
        if ends:
            self.looked_ahead = False
        self.window, self.masked = without_inputs(self.window), {}
        self.steps = 0 if ends else self.steps + 1
        self.updates = (0 if teaches else self.updates + 1) if ends else self.updates

    def engines(self) -> Mapping[str, Engine]:
        return {NETWORK: self.teacher.network, **self.feedback.engines()}

    def metrics(self) -> Mapping[str, Any]:
        """lessons: steps that the masking network has made so far; mean_probability, entropy (of a patch's own masking,
        in nats), overlap (share of the loader's random masks that are masked too): of this rank's last window;
        gradient_norm, below_eps: of the last lesson; time: share of each level; and what the feedback adds. A value
        that there is none of yet is left out."""
        assert self.window is not None, "metrics are asked for after a step"
        values = {
            **described(self.window),
            "gradient_norm": self.teacher.gradient_norm,
            "below_eps": self.teacher.below_eps,
            **self.feedback.metrics(),
        }
        known = {name: float(value) for name, value in values.items() if value is not None}
        return {"lessons": self.lessons, **known, "time": self.clock.shares()}

    def state_dict(self) -> dict[str, Any]:
        counters = {"steps": self.steps, "updates": self.updates, "lessons": self.lessons}
        return {"counters": {**counters, "looked_ahead": self.looked_ahead}, "feedback": self.feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counters = state["counters"]
        self.steps, self.updates, self.lessons = (int(counters[name]) for name in ("steps", "updates", "lessons"))
        self.looked_ahead = bool(counters["looked_ahead"])
        self.feedback.load_state_dict(state["feedback"])


def without_inputs(window: MaskedWindow) -> MaskedWindow:
    """The same masks; the network's inputs are as large as a layer's activations."""
    return replace(window, selections=[replace(each, embeddings=None) for each in window.selections])


@torch.no_grad()
def described(window: MaskedWindow) -> dict[str, Tensor]:
    """What this rank's masks are like."""
    probabilities = torch.cat([each.probabilities for each in window.selections]).double().clamp(1e-12, 1 - 1e-12)
    entropy = -(probabilities * probabilities.log() + (1 - probabilities) * (1 - probabilities).log())
    shared, number = probabilities.new_zeros(()), 0
    for micro, selection in zip(window.micros, window.selections, strict=True):
        drawn = torch.zeros_like(selection.probabilities, dtype=torch.bool)
        drawn.scatter_(1, micro["masked"].flatten(0, 1), True)
        shared = shared + drawn.gather(1, selection.masked).sum()
        number += micro["masked"].numel()
    return {"mean_probability": probabilities.mean(), "entropy": entropy.mean(), "overlap": shared / number}
