"""Outer objective and its hypergradient (MLO-MAE eq. 3, 8-11), in the order of Algorithm 1:

`multilevel.unroll` inner steps (Stage I: encoder and decoder), one head step (Stage II), and after every
`multilevel.every`-th head step one outer step (Stage III: masking network).

    dL_val / dT = dE'/dT (dL_val / dE' + dC'/dE' dL_val / dC')          (eq. 9)

head.py computes the bracket, finite_difference.py multiplies it by dE'/dT (eq. 10). The steps themselves are
differentiated; despite the title of A.1, the implicit function theorem is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.core.run import RunContext
from trp_scale.data.sources import Downstream, TrainSource
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
"""Chooses masks for these micro-batches. Hooks and the model use them until the step itself starts."""

Clock = Callable[[str], AbstractContextManager[None]]
"""Adds the time inside the context to a named part."""


class OuterObjective:
    """Objective of the masking network. Its methods are called at fixed points of a cycle; by default they do nothing.

    Args:
        derivative: derivative of the inner objective by the masks.
        clock: measures the time of each part.
    Attributes:
        uses_last_step: the hypergradient differentiates the last inner step of a cycle and needs the network's inputs.
    """

    uses_last_step: bool = True
    settings: LearnedMasksSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        self.config = masked_config(run)
        self.settings = self.config.multilevel
        self.derivative, self.clock = derivative, clock

    def scale(self, ctx: StepContext) -> float:
        """Return the current share of the peak learning rate; all levels use the schedule of the weights."""
        return ctx.lr / self.config.optimizer.lr

    def unrolled_gradient(self, ctx: StepContext, choose: Choose) -> Hypergradient:
        """Return the hypergradient of steps that are undone, at the start of a cycle with an outer step."""
        return ()

    def before_last_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        """Prepare for the last inner step of a cycle with an outer step."""

    def counts(self, ctx: StepContext, window: MaskedWindow) -> Tensor:
        """Return the elements of each task in the global batch with these masks, [T]."""
        return window.counts

    def joined_view(self, ctx: StepContext, micro: Batch) -> Batch:
        """Return a joined micro-batch with the extras of the objective."""
        raise NotImplementedError(f"{type(self).__name__} must implement joined_view")

    def gradients(self, ctx: StepContext) -> None:
        """Read gradients after the last backward pass of every inner step."""

    def after_step(self, ctx: StepContext) -> None:
        """Follow an applied inner step, before a head step or an outer step."""

    def head_step(self, ctx: StepContext) -> None:
        """End a cycle without an outer step."""

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        """End a cycle with an outer step: make the head step and return the hypergradient.

        Args:
            window: masks of the last inner step.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement hypergradient")

    def engines(self) -> Mapping[str, Engine]:
        return {}

    def metrics(self) -> Mapping[str, Any]:
        """Return values of the last head step and the last outer step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""


class RaisedReconstruction(OuterObjective):
    """- L_rec, without labels: the network raises the reconstruction loss (ablation without downstream feedback; the
    idea of AutoMAE with this masking network). It differentiates the loss itself, not an inner step."""

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        with self.clock("difference"):
            return [(window, [gradient.times(-1.0) for gradient in self.derivative(ctx, window)])]


class ValidationLoss(OuterObjective):
    """L_val, the head's loss on D_val (eq. 3), after committed steps: E' is the encoder after the step of the run's
    optimizer, C' the head after its AdamW step.

    With v = response x dL_val / dE', dL_val / dT = - d/dT <v, grad_E L_rec> at the weights before the step. The
    response replaces eta_E of eq. 10: it is that of AdamW with a constant second moment.

    Raises:
        RefusedError: forwards read half-precision weights, which round the finite difference away.
    """

    settings: LabelledSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        if self.settings.exact_every == 0 and run.engine.rounds_weights:
            # Measured on a small model: the cosine with the exact gradient is 0.5 to 0.7, and 0.9997 with autocast.
            raise RefusedError(
                f"--multilevel.kind {self.settings.kind} moves the weights by a total length of "
                f"{self.settings.difference:g} (--multilevel.difference), but forwards read weights in half precision "
                "here, whose rounding is larger; allowed: --training.weights fp32, with DeepSpeed torch_autocast "
                "instead of bf16 in --ds_config, --training.precision fp32, --multilevel.kind reconstruction, or "
                "--multilevel.exact_every N to see the error"
            )
        self.sources: Downstream = run.sources.downstream
        self.level = self.head_level(run)
        self.base: Shards | None = None
        self.direction_norm: Tensor | None = None
        self.response_norm: Tensor | None = None
        self.exact = ExactComparison(run)
        self.last: HeadUpdate | None = None

    def head_level(self, run: RunContext) -> HeadLevel:
        """Return the head and its passes through the encoder."""
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
        """Make the head step and return the bracket of eq. 9."""
        with self.clock("validation"):
            train = on_device(self.sources.train.next_window(), ctx)
            validation = on_device(self.sources.validation.next_window(), ctx)
            return self.both_paths(ctx, train, validation, self.head_rule(ctx))

    def both_paths(self, ctx: StepContext, train: list[Batch], validation: list[Batch], rule: HeadRule) -> Shards:
        """Make the head step by this rule; return the bracket of eq. 9 at the weights that forwards read now."""

        def keep_step(gradient: Tensor) -> HeadStep:
            step = rule(gradient)
            self.keep_for_comparison(HeadUpdate(head=step, train=train, validation=validation))
            return step

        return self.level.encoder_gradient(ctx.engine, train, validation, ctx.step, keep_step)

    def direct_path(self, ctx: StepContext, engine: Engine) -> Shards:
        """Return dL_val / d weights of an engine's encoder on the next window of D_val, for variants in which the head
        step does not depend on the masks."""
        with self.clock("validation"):
            window, head = on_device(self.sources.validation.next_window(), ctx), self.level.head.parameters
            held = HeadStep(before=head, parameters=head, response=torch.zeros_like(head.flat()))
            self.keep_for_comparison(HeadUpdate(head=held, train=window, validation=window))
            return self.level.direct_gradient(engine, window, ctx.step)

    def keep_for_comparison(self, update: HeadUpdate) -> None:
        """Keep the inputs of a hypergradient for its comparison."""
        self.last = update if self.exact.every > 0 else None

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        engine, respond = ctx.engine, partial(ctx.engine.step_response, lr=stats.lr, grad_norm=stats.grad_norm)
        base, self.base = self.base, None
        assert base is not None, "before_last_step keeps the weights"
        direction = self.encoder_gradient(ctx)
        self.direction_norm = direction.norm()
        direction = respond(direction)
        self.response_norm = direction.norm()
        gradients = self.through_inner_step(ctx, window, direction, base)
        if self.exact.due():
            response = respond(base.times(0.0).shift(1.0))
            self.compare(ctx, window, gradients, base, engine.weights(), response)  # base is restored up to rounding
        return gradients

    def through_inner_step(
        self, ctx: StepContext, window: MaskedWindow, direction: Shards, base: Shards | None
    ) -> Hypergradient:
        """Return - d <direction, grad_E L_rec> / d masks at base, by a finite difference (eq. 10).

        Args:
            direction: response x dL_val / dE'.
            base: weights before the inner step; `None` = the current weights.
        """
        with self.clock("difference"):
            gradients = finite_difference(
                self.derivative, ctx, window, direction, length=self.settings.difference, base=base
            )
            return [(window, [gradient.times(-1.0) for gradient in gradients])]

    def outer_encoder(self, ctx: StepContext, after: Weights, response: Weights) -> tuple[Weights, Weights]:
        """Return the encoder that L_val reads after a step of E, and its derivative by the gradient of the step."""
        return after, response

    def compare(
        self,
        ctx: StepContext,
        window: MaskedWindow,
        approximate: Hypergradient,
        before: Shards,
        after: Shards,
        response: Shards,
    ) -> None:
        """Compare with the exact hypergradient of one inner step; see `WholeStep`."""
        assert self.last is not None, "the head made a step"
        start, end, slope = (whole(ctx.engine, shards) for shards in (before, after, response))
        end, slope = self.outer_encoder(ctx, end, slope)
        step, self.last = WholeStep(before=start, after=end, response=slope, update=self.last), None
        ((_, gradients),) = approximate
        self.exact.compare(ctx, self.derivative, self.level, window, gradients, step)

    def metrics(self) -> Mapping[str, Any]:
        """Return head_loss and validation_loss (means over the last batches), direction_norm (|dL_val / dE'|),
        response_norm (the same times the response of the step), and exact_cosine and exact_norm_ratio of the last
        comparison."""
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


def on_device(window: Sequence[Batch], ctx: StepContext) -> list[Batch]:
    """Copy the micro-batches to the device of the engine."""
    return [micro.to(ctx.engine.device) for micro in window]


@dataclass(frozen=True, kw_only=True)
class InnerStep:
    """An unrolled step. Attributes: ctx: its context for hooks; window: its masks; offset: offset of its weights from
    the current weights; `None` = no offset."""

    ctx: StepContext
    window: MaskedWindow
    offset: Shards | None


class UnrolledValidationLoss(ValidationLoss):
    """L_val after unrolled steps that are undone: gradient descent as printed (MLO-MAE eq. 6-11, Algorithm 1).

    At the start of a cycle the encoder makes `unroll` inner steps of gradient descent on the next windows, and the head
    makes one step from there. The outer step descends on the loss on D_val at these weights. Then the weights are
    restored, and the real steps of the cycle use the new masks.
    """

    uses_last_step = False
    settings: HeadSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        self.unlabelled: TrainSource = run.sources.train  # D_u

    def before_last_step(self, ctx: StepContext, window: MaskedWindow) -> None:
        """Do nothing: the outer step is at the start of the cycle."""

    def hypergradient(self, ctx: StepContext, stats: StepStats, window: MaskedWindow) -> Hypergradient:
        """Make only the head step, as in every cycle."""
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
            last, present = steps[-1], engine.weights()
            before = present if last.offset is None else present.plus(last.offset)
            response = present.times(0.0).shift(rate)
            self.compare(last.ctx, last.window, results[0], before, present.plus(end), response)
        if self.settings.derivative == "full":
            for earlier, step in zip(reversed(steps[:-1]), reversed(steps), strict=False):
                # dE_{k+1} / dE_k = 1 - eta_E Hessian
                direction = direction.plus(self._hessian_product(step, direction), -rate)
                results.append(self._through(earlier, direction.times(rate)))
        return [pair for pairs in results for pair in pairs]

    def _unroll(self, ctx: StepContext, choose: Choose, rate: float) -> tuple[list[InnerStep], Shards]:
        """Return the differentiated steps, and the offset of the weights after them (eq. 6)."""
        windows = [ctx.window, *(on_device(later, ctx) for later in self.unlabelled.peek(self.settings.unroll - 1))]
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
            steps.append(InnerStep(ctx=inner_ctx, window=window, offset=offset))
            offset = gradient.times(-rate) if offset is None else offset.plus(gradient, -rate)
        assert offset is not None, "unroll is at least 1"
        return steps, offset

    def _through(self, step: InnerStep, direction: Shards) -> Hypergradient:
        with _offset_weights(step.ctx.engine, step.offset):
            return self.through_inner_step(step.ctx, step.window, direction, None)

    def _hessian_product(self, step: InnerStep, direction: Shards) -> Shards:
        """Return the Hessian of the reconstruction at a step times a direction, by one central difference of its
        gradient."""
        engine = step.ctx.engine
        epsilon = self.settings.difference / direction.norm().clamp(min=SMALLEST)

        losses = _losses(step.ctx, step.window.micros)
        with (
            _offset_weights(engine, step.offset),
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
