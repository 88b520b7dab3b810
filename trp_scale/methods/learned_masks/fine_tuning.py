"""A second encoder, held near the first, learns with the head: full fine-tuning in Stage II (MLO-MAE D.5, eq. 13)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine, EngineError, Stores
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Region, Shards, foreach_chunks
from trp_scale.core.run import RunContext
from trp_scale.methods.learned_masks.finite_difference import MaskDerivative, Weights, whole
from trp_scale.methods.learned_masks.head import global_rows, global_sum, leaf
from trp_scale.methods.learned_masks.hypergradient import Clock, ValidationLoss, on_device
from trp_scale.methods.learned_masks.settings import FineTuningSettings

FINE_TUNED = "fine_tuned"
"""Name of the second encoder's engine, and prefix of its tensors in a checkpoint."""


class FineTunedValidationLoss(ValidationLoss):
    """L_val of a second encoder F and the head, which both learn on D_tr at the end of each cycle.

    F's step is one of the run's optimizer down L_cls(D_tr; F, C), and a pull towards E, both of the same F and with the
    same learning rate: F' = F - step(grad L_cls) - 2 eta lambda (F - E). With plain gradient descent that is the step
    down L_cls + lambda ||F - E||^2; as decay, the pull does not go through AdamW's moments. The head's step depends on
    F alone, so that the masks act on L_val by dF' / dE = 2 eta lambda.

    Attributes:
        tuned: holds F, whose pieces lie as the run's engine's do.
    """

    settings: FineTuningSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        self.tuned = second_encoder(run)
        self.distance: Tensor | None = None

    def head_step(self, ctx: StepContext) -> None:
        with self.clock("head"):
            self.learn(ctx, on_device(self.sources.train.next_window(), ctx))

    def encoder_gradient(self, ctx: StepContext) -> Shards:
        self.head_step(ctx)
        return self.direct_path(ctx, self.tuned).times(self.settings.pull(ctx.lr))

    def seen(self, ctx: StepContext, after: Weights, response: Weights) -> tuple[Weights, Weights]:
        """F, which moves by a share of what E moves by (dF' / dE)."""
        pulled = {name: self.settings.pull(ctx.lr) * value for name, value in response.items()}
        return whole(self.tuned, self.tuned.weights()), pulled

    def learn(self, ctx: StepContext, window: list[Batch]) -> None:
        """A step of F and of the head. Where its gradient is not finite F is pulled all the same, so that dF' / dE is
        what it always is."""
        level, tuned = self.level, self.tuned
        rows = global_rows(tuned, window)
        way = distance_between(ctx.engine, tuned)
        head = leaf(level.head.parameters.flat())
        losses: list[Tensor] = []
        tuned.clear_unused_gradients()  # the decoder's: it takes no part
        for number, micro in enumerate(window):
            part = level.head_input(level.features(tuned, [micro])[0], micro, learning=True, step=ctx.step)
            losses.append(level.loss(part, level.head.own.like(head)) / rows)
            tuned.backward(losses[-1], last=number == len(window) - 1)
            losses[-1] = losses[-1].detach()
        assert head.grad is not None, "every micro-batch goes through the head"
        gradient = tuned.reduce_hook_gradient(head.grad)
        (level.train_loss,) = global_sum(tuned.data_group, [torch.stack(losses).sum()])
        if math.isfinite(float(tuned.check_gradients())):  # once in a cycle the host waits
            tuned.step(ctx.lr)
            level.head.adamw_step(gradient, self.scale(ctx))
        else:
            tuned.skip()
        self.distance = way.norm()
        move(tuned, way, self.settings.pull(ctx.lr))

    def engines(self) -> Mapping[str, Engine]:
        return {FINE_TUNED: self.tuned}

    def metrics(self) -> Mapping[str, Any]:
        """Also distance: ||F - E|| before the last update."""
        return {**super().metrics(), "distance": self.distance}


def second_encoder(run: RunContext) -> Engine:
    """An engine like the run's with the same model, which starts at the run's weights. The decoder comes along, so that
    the pieces of both lie alike; it takes no part.

    Raises:
        EngineError: the pieces do not lie alike.
    """
    assert run.make_engine is not None and run.make_model is not None, "a run that can make a second encoder"
    engine, tuned = run.engine, run.make_engine(run.make_model(), copy.deepcopy(run.config))
    tuned.create_optimizer_state()  # the decoder's too, which a checkpoint holds and no step makes
    if storage_layout(tuned) != storage_layout(engine):
        raise EngineError(
            f"the engine {engine.name} shards the second encoder of --multilevel.kind fine_tuning differently from the "
            "first; allowed: --multilevel.kind head or joint, or another engine"
        )
    with torch.no_grad():
        for mine, theirs in foreach_chunks(current_weights(tuned).parts, current_weights(engine).parts):
            torch._foreach_copy_(mine, theirs)
    tuned.publish_weights()
    return tuned


def storage_layout(engine: Stores) -> list[tuple[str, tuple[int, ...], Region, bool]]:
    """Return the region of the parameter that each piece stores."""
    return [(piece.name, piece.shape, piece.region, piece.owner) for piece in engine.pieces()]


def current_weights(engine: Engine) -> Shards:
    """The weights themselves, not a copy."""
    pieces = list(engine.pieces())
    return Shards(
        parts=[piece.tensors["weight"] for piece in pieces],
        owned=[piece.owner for piece in pieces],
        group=engine.shard_group,
    )


@torch.no_grad()
def distance_between(engine: Engine, tuned: Engine) -> Shards:
    """The way from the second engine's weights to the first's."""
    return current_weights(engine).plus(current_weights(tuned), -1.0)


@torch.no_grad()
def move(engine: Engine, way: Shards, share: float) -> None:
    """Weights + share x way, in place."""
    for weights, parts in foreach_chunks(current_weights(engine).parts, way.parts):
        torch._foreach_add_(weights, parts, alpha=share)
    engine.publish_weights()
