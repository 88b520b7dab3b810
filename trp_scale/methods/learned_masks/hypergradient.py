"""The outer objective and its hypergradient (MLO-MAE eq. 3, 8-11), in the order of a cycle (Algorithm 1):

`multilevel.unroll` inner steps (Stage I: encoder and decoder), one head step (Stage II), and after each
`multilevel.every`-th head step one outer step (Stage III: the masking network).

    dL_val / dT = dE'/dT (dL_val / dE' + dC'/dE' dL_val / dC')          (eq. 9)

head.py gives the bracket, finite_difference.py carries it through dE'/dT (eq. 10). Steps are differentiated as they are
made: no implicit function theorem is used, though the paper's A.1 bears its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.core.run import RunContext
from trp_scale.data.sources import Downstream
from trp_scale.methods.learned_masks.finite_difference import (
    SMALLEST,
    ExactComparison,
    HeadUpdate,
    MaskDerivative,
    Weights,
    WholeStep,
    finite_difference,
    whole,
)
from trp_scale.methods.learned_masks.head import Head, HeadLevel, HeadRule, HeadStep
from trp_scale.methods.learned_masks.masks import Hypergradient, MaskedWindow, masked_config
from trp_scale.methods.learned_masks.settings import HeadSettings, LabelledSettings, LearnedMasksSettings

Choose = Callable[[StepContext, Sequence[Batch]], MaskedWindow]
"""Chooses masks for these micro-batches. Hooks and model see them with these until the step itself begins."""

Clock = Callable[[str], AbstractContextManager[None]]
"""Counts the time inside as that of a named part."""


class OuterObjective:
    """Objective of the masking network, and the points of a cycle at which it is computed. A point that a subclass
    leaves alone does nothing.

    Args:
        run: whose masks are learned.
        derivative: of the inner objective by the masks.
        clock: counts the time of each part.
    Attributes:
        of_last_step: the hypergradient is of the cycle's last inner step, for which the network's inputs are kept.
    """

    of_last_step: bool = True
    settings: LearnedMasksSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        self.config = masked_config(run)
        self.settings = self.config.multilevel
        self.derivative, self.clock = derivative, clock

    def scale(self, ctx: StepContext) -> float:
        """The present learning rates as a share of their peaks: all levels have the weights' schedule."""
        return ctx.lr / self.config.optimizer.lr

    def unrolled_gradient(self, ctx: StepContext, choose: Choose) -> Hypergradient:
        """The hypergradient of steps that are taken back: at the start of a cycle with an outer step, before its first
        masks are chosen."""
        return ()

    def before_last_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        """Before the last inner step of a cycle with an outer step."""

    def counts(self, ctx: StepContext, window: MaskedWindow) -> Tensor:
        """[T] elements of each task in the global batch with these masks."""
        return window.counts

    def joined_view(self, ctx: StepContext, micro: Batch) -> Batch:
        """Return the objective's view of a micro-batch that was joined to the window."""
        raise NotImplementedError(f"{type(self).__name__} joins no micro-batches to a window")

    def gradients(self, ctx: StepContext) -> None:
        """After the last backward of every inner step."""

    def after_step(self, ctx: StepContext) -> None:
        """After every inner step that was applied, before a head step or an outer step."""

    def head_step(self, ctx: StepContext) -> None:
        """End a cycle without an outer step."""

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        """End a cycle with an outer step: the head's step, and the hypergradient.

        Args:
            window: the masks of the inner step that has just been made.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what the masking network learns from")

    def engines(self) -> Mapping[str, Engine]:
        """Engines of its own."""
        return {}

    def metrics(self) -> Mapping[str, Any]:
        """Values of the last head step and the last outer step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave."""


class RaisedReconstruction(OuterObjective):
    """- L_rec, without labels: the network raises the reconstruction loss (the ablation without downstream feedback,
    AutoMAE's idea with this masking network). It acts on the loss itself: there is no inner step to go through."""

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        with self.clock("difference"):
            return [(window, [gradient.times(-1.0) for gradient in self.derivative(ctx, window)])]


class ValidationLoss(OuterObjective):
    """L_val, the head's loss on D_val (eq. 3), after committed steps: E' is where the run's optimizer has really taken
    the encoder, C' where the head's AdamW has taken the head.

    With v = response x dL_val / dE', dL_val / dT = - d/dT <v, grad_E L_rec> at the weights before the step. The
    response stands for eta_E of eq. 10: it is AdamW's, whose second moment is held.

    Attributes:
        level: the head.
        sources: D_tr and D_val.

    Raises:
        RefusedError: forwards read weights in which the moves that masks are learned by are lost.
    """

    settings: LabelledSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        _refuse_rounded_weights(self.settings, run.engine)
        self.sources: Downstream = run.sources.downstream
        self.level = self.head_level(run)
        self.base: Shards | None = None
        self.direction_norm: Tensor | None = None
        self.response_norm: Tensor | None = None
        self.exact = ExactComparison(run)
        self.last: HeadUpdate | None = None

    def head_level(self, run: RunContext) -> HeadLevel:
        """The head, with the passes of the encoder that it needs."""
        wide = torch.promote_types(next(run.engine.module.parameters()).dtype, torch.float32)
        head = Head(self.config, run.sources.downstream.classes, run.device, wide)
        return HeadLevel(self.config, run.objective, head)  # type: ignore[arg-type]  # checked with the settings

    def before_last_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        self.base = ctx.engine.weights()

    def head_step(self, ctx: StepContext) -> None:
        with self.clock("head"):
            window = on_device(self.sources.train.next_window(), ctx)
            self.level.frozen_step(ctx.engine, window, ctx.step, self.head_rule(ctx))

    def head_rule(self, ctx: StepContext) -> HeadRule:
        """Return the head's update rule at the end of a cycle."""
        return partial(self.level.head.adamw_step, scale=self.scale(ctx))

    def encoder_gradient(self, ctx: StepContext) -> Shards:
        """The head's step, and the bracket of eq. 9."""
        with self.clock("validation"):
            train = on_device(self.sources.train.next_window(), ctx)
            validation = on_device(self.sources.validation.next_window(), ctx)
            return self.both_paths(ctx, train, validation, self.head_rule(ctx))

    def both_paths(self, ctx: StepContext, train: list[Batch], validation: list[Batch], rule: HeadRule) -> Shards:
        """The head's step by this rule, and the bracket of eq. 9 at the weights that forwards read now."""

        def noted(gradient: Tensor) -> HeadStep:
            step = rule(gradient)
            self.note(HeadUpdate(head=step, train=train, validation=validation))
            return step

        return self.level.encoder_gradient(ctx.engine, train, validation, ctx.step, noted)

    def direct_path(self, ctx: StepContext, engine: Engine) -> Shards:
        """dL_val / d weights of the encoder that an engine holds, on the next window of D_val: for variants in which
        the head's step does not depend on the masks."""
        with self.clock("validation"):
            window, head = on_device(self.sources.validation.next_window(), ctx), self.level.head.parameters
            held = HeadStep(before=head, parameters=head, response=torch.zeros_like(head.flat()))
            self.note(HeadUpdate(head=held, train=window, validation=window))
            return self.level.direct_gradient(engine, window, ctx.step)

    def note(self, update: HeadUpdate) -> None:
        """Keep what a hypergradient comes from until it has been compared."""
        self.last = update if self.exact.every > 0 else None

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        engine, respond = ctx.engine, partial(ctx.engine.step_response, lr=stats.lr, grad_norm=stats.grad_norm)
        base, self.base = self.base, None
        assert base is not None, "the weights before the step were kept"
        direction = self.encoder_gradient(ctx)
        self.direction_norm = direction.norm()
        direction = respond(direction)
        self.response_norm = direction.norm()
        gradients = self.through_inner_step(ctx, window, direction, base)
        if self.exact.due():
            places = (base, engine.weights(), respond(base.times(0.0).shift(1.0)))  # base is back but for rounding
            self.compare(ctx, window, gradients, *(whole(engine, shards) for shards in places))
        return gradients

    def through_inner_step(
        self, ctx: StepContext, window: MaskedWindow, direction: Shards, base: Shards | None
    ) -> Hypergradient:
        """- d <direction, grad_E L_rec> / d masks, at base: eq. 10, by a finite difference.

        Args:
            direction: response x dL_val / dE'.
            base: weights before the inner step; None = the present ones.
        """
        with self.clock("difference"):
            gradients = finite_difference(
                self.derivative, ctx, window, direction, length=self.settings.difference, base=base
            )
            return [(window, [gradient.times(-1.0) for gradient in gradients])]

    def seen(self, ctx: StepContext, after: Weights, response: Weights) -> tuple[Weights, Weights]:
        """The encoder whose features L_val is of, after a step of E, and its derivative by the step's gradient."""
        return after, response

    def compare(
        self,
        ctx: StepContext,
        window: MaskedWindow,
        approximate: Hypergradient,
        before: Weights,
        after: Weights,
        response: Weights,
    ) -> None:
        """Take note of how well this agrees with the exact hypergradient of one inner step; see WholeStep."""
        assert self.last is not None, "the head has stepped"
        after, response = self.seen(ctx, after, response)
        step = WholeStep(before=before, after=after, response=response, update=self.last, number=ctx.step)
        self.last = None
        ((_, gradients),) = approximate
        self.exact.compare(ctx, self.derivative, self.level, window, gradients, step)

    def metrics(self) -> Mapping[str, Any]:
        """head_loss, validation_loss: means over the last batches; direction_norm: |dL_val / dE'|; response_norm: the
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
        return {"head": self.level.head.state_dict(), "hypergradients": self.exact.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level.head.load_state_dict(state["head"])
        self.exact.number = int(state["hypergradients"])


def _refuse_rounded_weights(settings: LabelledSettings, engine: Engine) -> None:
    """Measured on a small model: the cosine with the exact gradient is 0.5 to 0.7, and 0.9997 with autocast."""
    if settings.exact_every > 0 or not engine.rounds_weights:
        return
    raise RefusedError(
        f"--multilevel.kind {settings.kind} learns from losses at weights that are moved by {settings.difference:g} in "
        "all (--multilevel.difference), and the weights that forwards read here are in half precision, where rounding "
        "is larger than that; allowed: --training.weights fp32, with DeepSpeed torch_autocast instead of bf16 in "
        "--ds_config, --training.precision fp32, --multilevel.kind reconstruction, or --multilevel.exact_every N to "
        "see by how much it is wrong"
    )


def on_device(window: Sequence[Batch], ctx: StepContext) -> list[Batch]:
    """The micro-batches where the engine computes."""
    return [micro.to(ctx.engine.device) for micro in window]


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
    """L_val after unrolled steps that are taken back: gradient descent as printed (MLO-MAE eq. 6-11, Algorithm 1).

    At the start of a cycle the encoder is moved along `unroll` inner steps of gradient descent, on the very windows
    that come next, and the head by one step from there. The outer step is down the loss on D_val at that place. Then
    everything is where it was, and the cycle's real steps see the network's new masks.

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
